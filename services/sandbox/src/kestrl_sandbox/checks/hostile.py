"""The table of hostile programs. Sources: SandboxFusion's, Piston's and inspect's tests, and published escapes of
sandboxes (runc, Judge0, Nomad), each as the attempt that they would need.
"""

from __future__ import annotations

from kestrl_sandbox.checks.verdicts import ANY, Check
from kestrl_sandbox.contract import Language, Outcome

OK = frozenset({Outcome.OK})
TIMEOUT = frozenset({Outcome.TIMEOUT})
MEMORY = frozenset({Outcome.OUT_OF_MEMORY, Outcome.SIGNAL, Outcome.NONZERO_EXIT, Outcome.OK})


def _checks(area: str, programs: dict[str, str], **options: object) -> list[Check]:
    return [Check(area=area, name=name, code=code, **options) for name, code in programs.items()]  # type: ignore[arg-type]


RESOURCES = [
    Check(
        area="resources", name="fork bomb", code="while True:\n    os.fork()", outcomes=ANY, says_held=False, seconds=1
    ),
    Check(
        area="resources",
        name="fork bomb of bash",
        code=":(){ :|:& };: ; wait; echo held",
        language=Language.BASH,
        outcomes=ANY,
        seconds=1,
        says_held=False,
    ),
    Check(
        area="resources",
        name="thread bomb",
        code=(
            "import threading, time\ntry:\n    for _ in range(10_000):\n"
            "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    print('BREACH')\n"
            "except (RuntimeError, MemoryError):\n    print('held')"
        ),
        outcomes=ANY,
        seconds=1,
    ),
    Check(
        area="resources",
        name="memory of one process",
        code="parts = []\nwhile True:\n    parts.append(bytearray(1 << 24))",
        outcomes=frozenset({Outcome.OUT_OF_MEMORY}),
        seconds=10,
    ),
    Check(
        area="resources",
        name="memory of many processes",
        code=(
            "for _ in range(12):\n    if os.fork() == 0:\n        kept = bytearray(b'x') * (100 << 20)\n"
            "        import time; time.sleep(60)\nfor _ in range(12):\n    _, status = os.wait()\n"
            "    if status: print('held'); sys.exit()\nprint('BREACH')"
        ),
        outcomes=ANY,
        seconds=5,
    ),
    Check(
        area="resources",
        name="memory in /dev/shm",
        code="with open('/dev/shm/x', 'wb') as f:\n    attempt(lambda: [f.write(bytes(1 << 20)) for _ in range(4096)])",
        seconds=10,
    ),
    *_checks(
        "resources",
        {
            "fill the disk": (
                "fs = [open(f'/tmp/{n}', 'wb') for n in range(9)]\n"
                "attempt(lambda: [f.write(bytes(1 << 20)) for _ in range(400) for f in fs])"
            ),
            "fill the disk by fallocate": "attempt(lambda: os.posix_fallocate(os.open('/tmp/x', 66), 0, 10 ** 10))",
            "use up all inodes": "attempt(lambda: [open(f'/tmp/{n}', 'w').close() for n in range(100_000)])",
            "use up all descriptors": "attempt(lambda: [os.dup(0) for _ in range(100_000)])",
            "raise a limit": (
                "import resource\ntry:\n"
                "    resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); print('BREACH')\n"
                "except (ValueError, PermissionError):\n    print('held')"
            ),
            "raise its priority": "attempt(os.nice, -10)",
            "real-time scheduling": "attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))",
            "shared memory of System V": "call(29, 194, 0, 1 << 20, 0o1600)",
            "memory file": "attempt(os.memfd_create, 'x')",
        },
        seconds=5,
    ),
    Check(
        area="resources",
        name="sparse file",
        code="import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "attempt(os.truncate, os.open('/tmp/x', 66), 10**13)",
    ),
    Check(area="resources", name="endless loop", code="while True: pass", outcomes=TIMEOUT, seconds=0.5),
    Check(area="resources", name="endless sleep", code="import time; time.sleep(600)", outcomes=TIMEOUT, seconds=0.3),
    Check(
        area="resources",
        name="regular expression without end",
        code="import re; re.match('(a+)+$', 'a' * 64 + 'b')",
        outcomes=TIMEOUT,
        seconds=0.5,
    ),
    Check(
        area="resources",
        name="ignores every signal",
        code="import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): "
        "signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        outcomes=TIMEOUT,
        seconds=0.3,
    ),
    Check(area="resources", name="stops itself", code="os.kill(os.getpid(), 19)", outcomes=TIMEOUT, seconds=0.3),
    Check(
        area="resources",
        name="floods standard output",
        code="while True: os.write(1, b'x' * 65536)",
        outcomes=TIMEOUT,
        truncated=True,
        seconds=0.5,
    ),
    Check(
        area="resources",
        name="floods standard error",
        code="while True: os.write(2, b'x' * 65536)",
        outcomes=TIMEOUT,
        truncated=True,
        seconds=0.5,
    ),
    Check(
        area="resources",
        name="three megabytes in one line",
        code="print('x' * 3_000_000); print('held', file=sys.stderr)",
        outcomes=OK,
        truncated=True,
        says_held=False,
        seconds=10,
    ),
    Check(
        area="resources",
        name="output that is no text",
        code="os.write(1, bytes(range(256)) * 99); print('held', flush=True)",
        outcomes=OK,
    ),
    Check(
        area="resources",
        name="input that nobody reads",
        code="print('held')",
        stdin=b"x" * 4_000_000,
        outcomes=OK,
    ),
    Check(
        area="resources",
        name="recursion",
        code="def f(): f()\nsys.setrecursionlimit(10**9)\ntry:\n    f()\n"
        "except (RecursionError, MemoryError):\n    print('held')",
        outcomes=ANY,
        says_held=False,
        seconds=1,
    ),
    Check(
        area="resources",
        name="dumps core",
        code="os.chdir('/tmp')\nif os.fork() == 0: os.abort()\n"
        "os.wait(); print('BREACH') if os.listdir('/tmp') else print('held')",
    ),
]

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
    *_checks(
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

FILES = [
    *_checks(
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
    *_checks(
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
    *_checks(
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

KERNEL = _checks(
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


def _connect(host: str, port: int, kind: str = "SOCK_STREAM", family: str = "AF_INET") -> str:
    return (
        f"def reach():\n    s = socket.socket(socket.{family}, socket.{kind}); s.settimeout(.3)\n"
        f"    s.connect(({host!r}, {port})); s.send(b'x')\nattempt(reach)"
    )


NETWORK = _checks(
    "network",
    {
        "TCP to the internet": _connect("1.1.1.1", 443),
        "UDP to the internet": _connect("8.8.8.8", 53, "SOCK_DGRAM"),
        "IPv6": _connect("2606:4700:4700::1111", 443, family="AF_INET6"),
        "loopback of the host": _connect("127.0.0.1", 22),
        "cloud metadata": _connect("169.254.169.254", 80),
        "cloud metadata, IPv6": _connect("fd00:ec2::254", 80, family="AF_INET6"),
        "cloud metadata of another cloud": _connect("100.100.100.200", 80),
        "kubelet": _connect("10.0.0.1", 10250),
        "a name": "attempt(socket.getaddrinfo, 'kubernetes.default.svc', 443)",
        "raw socket": "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
        "packet socket": "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)",
        "netlink socket": "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "vsock": "attempt(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM, 0)",
        "crypto socket": "attempt(socket.socket, socket.AF_ALG, socket.SOCK_SEQPACKET, 0)",
        "listen": "def listen():\n    s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\nattempt(listen)",
        "interfaces": (
            "try:\n    names = [line.split(':')[0].strip() for line in open('/proc/self/net/dev').readlines()[2:]]\n"
            "except FileNotFoundError:\n    names = []\n"
            "print('BREACH', names) if set(names) - {'lo'} else print('held')"
        ),
        "a proxy in the environment": (
            "found = [n for n in os.environ if 'proxy' in n.lower()]\n"
            "print('BREACH', found) if found else print('held')"
        ),
    },
    seconds=5,
)

IDENTITY = _checks(
    "identity",
    {
        "secrets in the environment": (
            "found = [n for n in os.environ if any(w in n for w in ('KEY', "
            "'TOKEN', 'SECRET', 'KESTRL', 'AWS', 'KUBE'))]\n"
            "print('BREACH', found) if found else print('held')"
        ),
        "name of the host": "print('held') if os.uname().nodename == 'sandbox' else "
        "print('BREACH', os.uname().nodename)",
        "users of the host": (
            "import pwd\nnames = sorted(u.pw_name for u in pwd.getpwall())\n"
            "print('held') if names == ['nobody', 'root', 'sandbox'] else print('BREACH', names)"
        ),
        "processes of the host": (
            "pids = {int(n) for n in os.listdir('/proc') if n.isdigit()}\n"
            "print('held') if pids <= {1, os.getpid()} else print('BREACH', pids)"
        ),
        "cgroups of the host": (
            "found = os.path.exists('/sys/fs/cgroup') or os.path.exists('/sys')\n"
            "print('BREACH') if found else print('held')"
        ),
        "home folders": (
            "found = [p for p in ('/home', '/root/.cache', '/srv', '/opt', '/boot') "
            "if os.path.exists(p) and os.listdir(p)]\n"
            "print('BREACH', found) if found and not sys.base_prefix.startswith(tuple(found)) else print('held')"
        ),
        "objects of the service in memory": (
            "import gc\nfound = [type(o).__name__ for o in gc.get_objects() if "
            "type(o).__module__.startswith('kestrl')]\n"
            "print('BREACH', found[:5]) if found else print('held')"
        ),
    },
)

CHECKS: tuple[Check, ...] = (*RESOURCES, *PROCESSES, *FILES, *KERNEL, *NETWORK, *IDENTITY)
