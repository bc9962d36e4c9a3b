"""Hostile programs that use up what a sandbox, or the node, has."""

from __future__ import annotations

from kestrl_sandbox.checks.verdicts import ANY, Check, checks
from kestrl_sandbox.contract import Language, Outcome

OK = frozenset({Outcome.OK})
TIMEOUT = frozenset({Outcome.TIMEOUT})

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
    *checks(
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

COUNTED = {
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_getevents": (208, 4),
    "io_pgetevents": (333, 292),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Calls whose objects the kernel counts for the node or a user of it, by their numbers on x86_64 and aarch64."""
NODE = checks(
    "node",
    {
        **{f"the call {name}": f"refused({x86}, {arm})" for name, (x86, arm) in COUNTED.items()},
        "contexts of asynchronous input and output": "call(206, 0, 128, ctypes.byref(ctypes.c_ulong(0)))",
        "instances of inotify": "call(294, 26, 0)",
        "buffers of pipes": "import fcntl\nattempt(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)",
        "descriptors in flight": (
            "a, b = socket.socketpair()\nattempt(lambda: [socket.send_fds(a, [b'x'], [0] * 200) for _ in range(9)])"
        ),
        "queued signals": (
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
            "sent = sum(libc.sigqueue(os.getpid(), 40, 0) == 0 for _ in range(2000))\n"
            "print('BREACH', sent) if sent > 1000 else print('held')"
        ),
        "leases of files": "import fcntl\nattempt(fcntl.fcntl, os.open('/work/x', 66), 1024, 1)",
        "notices of folders": "import fcntl\nattempt(fcntl.fcntl, os.open('/usr', 0), 1026, 2)",
        # No call is made: one that is would find that the descriptor does not exist.
        **{
            f"disks: {name}": f"print('held') if libc.{name}({arguments}) == 0 else print('BREACH', {name!r})"
            for name, arguments in (
                ("syncfs", "-1"),
                ("fsync", "-1"),
                ("fdatasync", "-1"),
                ("msync", "1, 1, 4"),
                ("sync_file_range", "-1, 0, 0, 0"),
            )
        },
    },
    seconds=5,
)
