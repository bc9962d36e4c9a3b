"""What runs in the sandbox's own processes: the standard library only, no import of anything else of KestRL.

`launcher` starts one zygote, which has imported what code usually needs, and forks a sandbox per run; `root` makes its
read-only root; `confinement` takes rights away (`seccomp`, `landlock`, `syscalls`); `supervisor` is process 1 of a
sandbox and answers; an `execution` drains output and keeps the deadline; `child` is the process in which `payload` runs
the code; `reports` are what a session's process says of a cell, and nothing in them is trusted.
"""
