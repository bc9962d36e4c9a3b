"""Hostile programs that attack the processes, the files and the kernel around them."""

from __future__ import annotations

from kestrl_sandbox.checks.verdicts import ANY, Check, checks
from kestrl_sandbox.contract import Language, Outcome

OK = frozenset({Outcome.OK})

PROCESSES = [
    Check(
        area="processes",
        name="a daemon that keeps the output open",
        code="if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time; time.sleep(600)\n    os._exit(0)\nprint('held')",
        outcomes=OK,
    ),
    Check(
        area="processes",
        name="a daemon with closed descriptors",
        code="if os.fork() == 0:\n    os.setsid(); os.closerange(0, 99)\n    while True: pass\nprint('held')",
        outcomes=OK,
    ),
    Check(area="processes", name="kill everything", code="os.kill(-1, 9)", outcomes=ANY, says_held=False),
    *checks(
        "processes",
        {
            "kill process 1": "try:\n    os.kill(1, 9)\nexcept PermissionError:\n    pass\n"
            "import time; time.sleep(.05); print('held')",
            "stop process 1": "try:\n    os.kill(1, 19)\nexcept PermissionError:\n    pass\n"
            "import time; time.sleep(.05); print('held')",
            "trace process 1": "call(101, 117, 16, 1, 0, 0)",
            "read the memory of process 1": "attempt(open, '/proc/1/mem', 'rb')",
            "read the environment of process 1": "attempt(lambda: open('/proc/1/environ', 'rb').read())",
            "look through the root of process 1": "attempt(os.listdir, '/proc/1/root')",
            "look through the descriptors of process 1": "attempt(os.listdir, '/proc/1/fd')",
            "inherited descriptors": (
                "found = [n for n in os.listdir('/proc/self/fd') if int(n) > 2 "
                "and os.path.exists(f'/proc/self/fd/{n}')]\n"
                "print('BREACH', found) if found else print('held')"
            ),
            "read another process's memory": "call(310, 270, 1, None, 0, None, 0, 0)",
            "many zombies": (
                "try:\n    for _ in range(500):\n        if os.fork() == 0: os._exit(0)\n    print('BREACH')\n"
                "except BlockingIOError:\n    print('held')"
            ),
        },
        outcomes=ANY,
        seconds=5,
    ),
]
SUPERVISOR = checks(
    "processes",
    {
        "limit process 1": "import resource\nattempt(resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0))",
        "delay process 1": "attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)",
        "delay the user's processes": "attempt(os.setpriority, os.PRIO_USER, 1000, 19)",
        "delay a group of processes": "attempt(os.setpriority, os.PRIO_PGRP, 0, 19)",
        "schedule process 1": "attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))",
        "move process 1": "attempt(os.sched_setaffinity, 1, [0])",
        "sockets of the supervisor": (
            "import stat\nfound = []\nfor number in range(3, 4096):\n"
            "    try:\n        found += [number] if stat.S_ISSOCK(os.fstat(number).st_mode) else []\n"
            "    except OSError:\n        pass\n"
            "print('BREACH', found) if found else print('held')"
        ),
        "interrupt process 1": "try:\n    os.kill(1, 2)\nexcept PermissionError:\n    pass\n"
        "import time; time.sleep(.05); print('held')",
    },
)

FILES = [
    *checks(
        "files",
        {
            f"read {path}": f"attempt(lambda: open({path!r}, 'rb').read(10))"
            for path in (
                "/etc/shadow",
                "/proc/kcore",
                "/proc/kmsg",
                "/proc/kallsyms",
                "/proc/1/maps",
                "/dev/mem",
                "/dev/vda",
                "/var/run/secrets/kubernetes.io/serviceaccount/token",
                "/root/.ssh/id_rsa",
                "/root/.bashrc",
                "/run/containerd/containerd.sock",
            )
        },
    ),
    *checks(
        "files",
        {
            f"write {path}": f"attempt(lambda: open({path!r}, 'w').write('x'))"
            for path in (
                "/x",
                "/usr/bin/x",
                "/usr/bin/env",
                "/etc/passwd",
                "/etc/ld.so.preload",
                "/mnt/x",
                "/var/x",
                "/root/x",
                "/dev/x",
                "/proc/sysrq-trigger",
                "/proc/sys/kernel/core_pattern",
                "/proc/sys/kernel/modprobe",
                "/proc/self/oom_score_adj",
                "/sys/fs/cgroup/release_agent",
                "/sys/fs/cgroup/cgroup.procs",
                "/sys/kernel/uevent_helper",
            )
        },
    ),
    *checks(
        "files",
        {
            "make a device": "attempt(os.mknod, '/tmp/sda', 0o60600, os.makedev(8, 0))",
            "make a character device": "attempt(os.mknod, '/tmp/mem', 0o20600, os.makedev(1, 1))",
            "mount": "call(165, 40, b'tmpfs', b'/tmp', b'tmpfs', 0, 0)",
            "remount the root for writing": "call(165, 40, b'none', b'/', 0, 32 | 4096, 0)",
            "unmount": "call(166, 39, b'/proc', 2)",
            "exchange the root": "call(155, 41, b'/tmp', b'/tmp')",
            "change the root": "attempt(os.chroot, '/tmp')",
            "open by handle": "call(304, 265, -100, b'x' * 64, 0)",
            "open a mount tree": "call(428, 428, -100, b'/', 1)",
            "leave by ..": "os.chdir('/'); print('BREACH') if os.path.exists('/' + '../' * "
            "20 + 'root/.bashrc') else print('held')",
        },
    ),
    Check(
        area="files",
        name="programs with the setuid bit",
        code=(
            "for program in su mount umount passwd chsh newgrp sudo pkexec; do\n"
            '  path=$(command -v $program) && [ -u "$path" ] && echo 1 | "$path" '
            "-c id 2>/dev/null | grep uid=0 && echo BREACH\n"
            'done; cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id; [ "$(/tmp/id -u)" = 1000 ] && echo held'
        ),
        language=Language.BASH,
        seconds=5,
    ),
]

KERNEL = checks(
    "kernel",
    {
        "new user namespace": "call(272, 97, 0x10000000)",
        "new mount namespace": "call(272, 97, 0x20000)",
        "clone into a user namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
        "clone3": "call(435, 435, b'\\0' * 88, 88)",
        "join a namespace": "call(308, 268, 0, 0)",
        "bpf": "call(321, 280, 0, b'\\0' * 64, 64)",
        "perf_event_open": "call(298, 241, b'\\0' * 120, 0, -1, -1, 0)",
        "userfaultfd": "call(323, 282, 1)",
        "keyctl": "call(250, 219, 0, -3, 0)",
        "request_key": "libc.syscall(249 if platform.machine() == 'x86_64' else 218, b'user', b'x', None, 0)\n"
        "print('held') if ctypes.get_errno() == errno.EPERM else print('BREACH', ctypes.get_errno())",
        "add_key": "call(248, 217, b'user', b'x', b'x', 1, -3)",
        "io_uring_setup": "call(425, 425, 4, b'\\0' * 120)",
        "kexec_load": "call(246, 104, 0, 0, 0, 0)",
        "init_module": "call(175, 105, b'x', 1, b'')",
        "finit_module": "call(313, 273, 0, b'', 0)",
        "reboot": "call(169, 142, 0xfee1dead - (1 << 32), 672274793, 0x1234567, 0)",
        "swapon": "call(167, 224, b'/tmp/x', 0)",
        "ptrace": "call(101, 117, 0, 0, 0, 0)",
        "read the kernel's log": "call(103, 116, 3, b'x' * 64, 64)",
        "personality": "call(135, 92, 0x0040000)",
        "set the clock": "call(227, 112, 0, b'\\0' * 16)",
        "set the host name": "attempt(socket.sethostname, 'x')",
        "fanotify": "call(300, 262, 0, 0)",
        "modify_ldt": "call(154, -1, 1, b'x' * 16, 16)",
        "put characters into a terminal": ("import fcntl\nattempt(fcntl.ioctl, 0, 0x5412, b'x')"),
        "another filter": "call(317, 277, 0, 0, 0)",
        "capabilities": (
            "import re\ntext = open('/proc/self/status').read()\n"
            "lines = dict(re.findall(r'(\\w+):\\s+(\\S+)', text))\n"
            "want = {'CapEff': '0' * 16, 'CapPrm': '0' * 16, 'CapBnd': '0' * "
            "16, 'CapAmb': '0' * 16, 'NoNewPrivs': '1', 'Seccomp': '2', 'Uid': '1000'}\n"
            "bad = {k: lines.get(k) for k in want if lines.get(k) != want[k]}\n"
            "print('BREACH', bad) if bad else print('held')"
        ),
        "become root": "attempt(os.setuid, 0)",
        "gain capabilities": "call(126, 91, b'\\0' * 8, b'\\xff' * 24)",
    },
)
