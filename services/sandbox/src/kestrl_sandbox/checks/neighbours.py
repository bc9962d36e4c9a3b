"""Checks of several runs: neighbours at the same time, and calls of one session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from kestrl_sandbox.checks.verdicts import PRELUDE, Check, CheckVerdict, detail_of, problem_of
from kestrl_sandbox.contract import Limits, Outcome, Run, Sandbox, SandboxFailure


async def neighbours(sandbox: Sandbox) -> CheckVerdict:
    """Two sandboxes at once: neither finds the other's files, processes, sockets or shared memory."""
    check = Check(area="tenancy", name="two sandboxes at once", code=_LOOK)
    started = time.monotonic()
    leaving = asyncio.create_task(sandbox.run(Run(code=PRELUDE + _LEAVE, limits=Limits(seconds=10))))
    looking = await sandbox.run(Run(code=PRELUDE + _LOOK, limits=Limits(seconds=10)))
    departures = await leaving
    problem = problem_of(check, looking)
    if not problem and departures.stdout != b"left\n":
        problem = f"the neighbour did not run: {departures.stderr[-200:].decode(errors='replace')}"
    return CheckVerdict(check=check, problem=problem, detail=detail_of(looking), seconds=time.monotonic() - started)


_LEAVE = """
import time, subprocess
for folder in ('/tmp', '/dev/shm', '/work', '/var/tmp'):
    open(folder + '/canary', 'w').write('secret')
server = socket.socket(socket.AF_UNIX); server.bind(chr(0) + 'canary'); server.listen()
child = subprocess.Popen(['sleep', '0.4'])
child.wait()
print('left')
"""
_LOOK = """
import time
for _ in range(10):
    for folder in ('/tmp', '/dev/shm', '/work', '/var/tmp'):
        if os.path.exists(folder + '/canary'): print('BREACH', folder)
    others = [n for n in os.listdir('/proc') if n.isdigit() and int(n) not in (1, os.getpid())]
    if others: print('BREACH', [open(f'/proc/{n}/cmdline').read() for n in others])
    try:
        socket.socket(socket.AF_UNIX).connect(chr(0) + 'canary')
        print('BREACH', 'abstract socket')
    except OSError:
        pass
    try:
        server = socket.socket(socket.AF_UNIX); server.bind(chr(0) + 'canary'); server.close()
    except OSError as error:
        print('BREACH', 'name of an abstract socket', error)
    try:
        if 'canary' in open('/proc/self/net/unix').read(): print('BREACH', 'list of sockets')
    except FileNotFoundError:
        pass
    time.sleep(.03)
print('held')
"""


async def orphans(sandbox: Sandbox) -> CheckVerdict:
    """One run after the other, each of which leaves a daemon that holds a name: the next ones find it free."""
    check = Check(area="processes", name="daemons of earlier runs", code=_STAY, outcomes=frozenset({Outcome.OK}))
    started = time.monotonic()
    problem, result = "", None
    for _ in range(RUNS):
        result = await sandbox.run(Run(code=PRELUDE + _STAY, limits=Limits(seconds=10)))
        problem = problem or problem_of(check, result)
    detail = detail_of(result) if result else ""
    return CheckVerdict(check=check, problem=problem, detail=detail, seconds=time.monotonic() - started)


RUNS = 9
"""More than a pool of a check has places."""
_STAY = """
server = socket.socket(socket.AF_UNIX)
try:
    server.bind(chr(0) + 'orphan')
    print('held', flush=True)
except OSError as error:
    print('BREACH', error, flush=True)
server.listen()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        while True: server.accept()
    os._exit(0)
os._exit(0)
"""


async def shortage(sandbox: Sandbox) -> CheckVerdict:
    """Two sandboxes at once: one takes all that it can of what the node counts, and the other needs some of each."""
    check = Check(area="node", name="a neighbour that needs them", code=_NEED, outcomes=frozenset({Outcome.OK}))
    started = time.monotonic()
    taking = asyncio.create_task(sandbox.run(Run(code=PRELUDE + _TAKE, limits=Limits(seconds=10))))
    needing = await sandbox.run(Run(code=PRELUDE + _NEED, limits=Limits(seconds=10)))
    await taking
    return CheckVerdict(
        check=check,
        problem=problem_of(check, needing),
        detail=detail_of(needing),
        seconds=time.monotonic() - started,
    )


_TAKE = """
import resource, signal, time, fcntl
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
number = 206 if platform.machine() == 'x86_64' else 0
kept = []
for _ in range(2):
    while libc.syscall(number, 1000, ctypes.byref(ctypes.c_ulong(0))) == 0: pass
    while libc.inotify_init1(0) >= 0: pass
    while libc.sigqueue(os.getpid(), 40, 0) == 0: pass
    try:
        a, b = socket.socketpair()
        while True: socket.send_fds(a, [b'x'], [0] * 200)
    except OSError: pass
    try:
        while True:
            kept.append(os.pipe()); fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
    except OSError: pass
time.sleep(.7)
"""
_NEED = """
import signal, subprocess, time
time.sleep(.3)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
needs = {
    'a queued signal': libc.sigqueue(os.getpid(), 40, 0) == 0,
    'a program and its output': len(subprocess.run(['head', '-c', '200000', '/dev/zero'], stdout=-1).stdout) == 200_000,
    'a timer': libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0,
}
print('held') if all(needs.values()) else print('BREACH', needs)
print('x' * 200_000)
"""
SESSIONS = {
    "an end that another process reports": "if os.fork() == 0:\n    while True: os.write(3, bytes(34))",
    "half a message": "os.write(3, (1 << 19).to_bytes(4, 'big') + bytes(4)); os.write(3, b'[' * 100_000)",
    "no connection": "os.closerange(0, 99)",
    "a long exception": "raise Exception('\\U0001F600' * 400_000)",
    "a process that goes on": "os.fork()",
    "an end amid the next call": "import threading; threading.Timer(.05, os._exit, [3]).start()",
}
"""What a call of a session does to the next one."""


async def sessions(sandbox: Sandbox) -> AsyncIterator[CheckVerdict]:
    """Hostile calls of sessions: each ends as its own, and the next is right or says that the session is gone."""
    for name, code in SESSIONS.items():
        check = Check(area="sessions", name=name, code=code)
        started = time.monotonic()
        problem = ""
        session = await sandbox.session()
        try:
            await session.run(Run(code=f"{PRELUDE}\n{code}", limits=Limits(seconds=2)))
            after = await session.run(Run(code="import time; time.sleep(.1); print(6 * 7)", limits=Limits(seconds=5)))
            if after.outcome is Outcome.OK and b"42\n" not in after.stdout:
                problem = f"the next call ended as {after.outcome} with {after.stdout[-100:]!r}"
        except SandboxFailure as error:
            problem = str(error)
        finally:
            await session.close()
        yield CheckVerdict(check=check, problem=problem, seconds=time.monotonic() - started)
