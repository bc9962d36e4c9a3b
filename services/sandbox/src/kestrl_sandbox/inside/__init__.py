"""What runs in the sandbox's own processes: the standard library only, no import of anything else of KestRL.

`launcher` starts one zygote, which has imported what code usually needs; `root` makes its read-only root; `slots` forks
a sandbox per run; `isolation` takes rights away (`seccomp`, `landlock`, `syscalls`); `supervisor` is process 1 of a
sandbox: it drains output, keeps the deadline and answers; `child` is the process in which `payload` runs the code.
"""
