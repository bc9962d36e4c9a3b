"""No code that was handed over causes a failure of the sandbox: programs from a grammar of tricks end as their own
outcome, in time, and the next call of a session is right or says that the session is gone.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from kestrl_sandbox.backends.bwrap import Bubblewrap
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Echo, Language, Limits, Outcome, Run, SandboxFailure
from kestrl_sandbox.inside import frames, reports
from kestrl_sandbox.inside.reports import Ended
from kestrl_sandbox.pool import slots
from kestrl_sandbox.pool.results import BROKEN, GONE
from kestrl_sandbox.pool.sandbox_pool import PooledSession, SandboxPool
from kestrl_sandbox.pool.slots import SandboxSlot, SlotLost

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECONDS = 0.5
BUSY = 3.0
"""Seconds that a machine with other work may need beside the second that is promised."""
PRELUDE = """
import atexit, builtins, ctypes, gc, json, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
REPORT = struct.pack('!16sB?B3I', bytes(16), 0, False, 0, 0, 0, 0)
def beside(work): threading.Thread(target=work, daemon=True).start()
def quietly(work, *arguments):
    try: return work(*arguments)
    except Exception: return None
def written(content, pause=0.0):
    for fd in range(3, 9):
        for part in ([content] if not pause else [content[n:n + 1] for n in range(min(len(content), 20))]):
            quietly(os.write, fd, part); time.sleep(pause)
"""
TRICKS = {
    "writes shared bytes of all frames": (
        "frame = sys._getframe()\nwhile frame:\n    for value in [*frame.f_locals.values(), *gc.get_objects()]:\n"
        "        if type(value).__name__ in ('mmap', 'bytearray', 'memoryview'):\n"
        "            quietly(lambda: value.__setitem__(0, {byte}))\n    frame = frame.f_back"
    ),
    "closes sockets of all frames": (
        "for value in gc.get_objects():\n    if type(value).__name__ == 'socket': quietly(value.close)"
    ),
    "writes deep JSON": "written(struct.pack('!II', 100_000, 0) + b'[' * 100_000)",
    "announces a long message": "written(struct.pack('!II', 1_000_000, 1 << 28)); written(b' ' * 20, .01)",
    "writes random bytes": "written(os.urandom({size}))",
    "writes a report of an end": "written(struct.pack('!16sB?B3I', bytes(16), 0, False, 1, 0, 0, 6) + b'forged')",
    "writes many reports": "for _ in range(500): written(b'x' * {size})",
    "writes nothing": "written(b''); quietly(lambda: socket.socket(fileno=os.dup(3)).send(b''))",
    "floods from a thread": "beside(lambda: [written(b'y' * 99) for _ in iter(int, 1)])",
    "shuts the connection down": "quietly(lambda: socket.socket(fileno=os.dup(3)).shutdown({how}))",
    "closes descriptors": "os.closerange({low}, 99)",
    "replaces a descriptor": "reading, writing = os.pipe(); quietly(os.dup2, writing, {low})",
    "uses up the descriptors": "kept = [quietly(os.dup, 0) for _ in range(300)]",
    "takes the next request": "beside(lambda: quietly(lambda: socket.socket(fileno=os.dup(3)).recv(9999)))",
    "signals process 1": "for number in range(1, 65):\n    for pid in (1, os.getppid()): quietly(os.kill, pid, number)",
    "limits process 1": ("for kind in range(16): quietly(resource.prlimit, 1, kind, (0, 0))"),
    "delays process 1": (
        "for kind, who in ((0, 1), (1, 1), (2, 1000), (2, 0)): quietly(os.setpriority, kind, who, 19)\n"
        "quietly(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))\nquietly(os.sched_setaffinity, 1, [0])"
    ),
    "takes a name of many lines": (
        "for name in (b'x\\fVmRSS:', b'x\\rThreads:', b'x\\x1cRssAnon:'): libc.prctl(15, name, 0, 0, 0)"
    ),
    "forks and goes on": "quietly(os.fork)",
    "forks past the interpreter": "libc.fork()",
    "leaves a writer": "if os.fork() == 0:\n    os.setsid()\n    while True: quietly(os.write, {stream}, b'z' * 65536)",
    "leaves a reporter": ("if os.fork() == 0:\n    while True: written(REPORT); time.sleep(.01)"),
    "leaves a raw reporter": ("if libc.fork() == 0:\n    while True: written(REPORT); time.sleep(.01)"),
    "leaves a killer": "own = os.getpid()\nif os.fork() == 0:\n    time.sleep(.02); os.kill(own, 9); os._exit(0)",
    "leaves a thread that ends it": "threading.Timer(.02, os._exit, [{status}]).start()",
    "leaves zombies": "for _ in range(20):\n    if os.fork() == 0: os._exit(0)",
    "breaks the streams": "sys.stdout = sys.stderr = sys.__stdout__ = None",
    "breaks the interpreter": "for name in ('open', 'len', 'isinstance', 'min'): quietly(delattr, builtins, name)",
    "breaks the modules": "json.loads = json.dumps = struct.Struct = os.write = os.getpid = socket.recv_fds = None",
    "never ends at its end": "atexit.register(lambda: [0 for _ in iter(int, 1)])",
    "puts pipes in the way": "for name in ('in', 'out', '/tmp/out'): quietly(os.mkfifo, name)",
    "puts links in the way": "for name in ('in', 'out'): quietly(os.symlink, '/proc/self/environ', name)",
    "fills the disk": "quietly(lambda: open('/tmp/full', 'wb').write(bytes(64 << 20)))",
    "has a long exception": "try: raise Exception('\\U0001F600' * {long})\nexcept Exception as error: raise",
    "has an exception of its own": (
        "class Own(BaseException):\n    def __str__(self): raise Own()\n    __repr__ = __str__\n"
        "class Text(str):\n    def __getitem__(self, key): raise Own()\n    encode = __getitem__\n"
        "Own.__name__ = 'x' * {long}\nraise Own(Text('y'))"
    ),
    "has a chain of exceptions": (
        "error = None\nfor _ in range({size}):\n    new = Exception(); new.__cause__ = error; error = new\nraise error"
    ),
    "shows a long value": "'\\u00e9' * {long}",
    "shows a lone surrogate": "'\\ud800' * {size}",
    "recurses": "def deeper(): deeper()\nsys.setrecursionlimit(10**8)\ndeeper()",
    "uses up the memory": "kept = bytearray(10**10)",
    "stops itself": "os.kill(os.getpid(), 19)",
    "spins": "while True: pass",
}
ENDS = [
    "",
    "os._exit({status})",
    "os.abort()",
    "raise SystemExit({status})",
    "os.kill(os.getpid(), {number})",
    "time.sleep(60)",
]


def program(seed: int) -> str:
    """A program of one to three tricks and an end, drawn by a seed."""
    draw = random.Random(seed)
    values = {
        "byte": draw.choice([0, 1, 2, 255]),
        "size": draw.choice([1, 17, 300, 5000]),
        "long": draw.choice([300, 70_000, 400_000]),
        "low": draw.choice([0, 1, 3, 4]),
        "how": draw.choice([0, 1, 2]),
        "stream": draw.choice([1, 2]),
        "status": draw.choice([0, 1, 2, 3, 125, 137, 159, 255]),
        "number": draw.choice([9, 11, 15, 31, 34]),
    }
    names = [list(TRICKS)[seed % len(TRICKS)], *draw.sample(list(TRICKS), draw.randrange(3))]
    draw.shuffle(names)
    lines = [*(TRICKS[name] for name in names), draw.choice(ENDS)]
    for key, value in values.items():
        lines = [line.replace("{" + key + "}", str(value)) for line in lines]
    code = PRELUDE + "\n".join(lines)
    compile(code, "program", "exec")
    return code


async def is_right_or_gone(session: PooledSession) -> bool:
    """Whether a call of a session is right, ends as no success, or says that the session is gone."""
    restarts = session.restarts
    after = await session.run(Run(code="echo second cell", language=Language.BASH, limits=Limits(seconds=5)))
    return b"second cell\n" in after.stdout or after.outcome is not Outcome.OK or session.restarts > restarts


@pytest.mark.parametrize("seed", range(2 * len(TRICKS)))
async def test_a_hostile_program_has_an_outcome_of_its_own(pool: SandboxPool, seed: int) -> None:
    code = program(seed)
    files = {"in": b"x"} if seed % 3 == 0 else {}
    limits = Limits(seconds=SECONDS, output_bytes=1000)
    run = Run(code=code, files=files, fetch=["out", "/tmp/out"], limits=limits)
    session = await pool.session()
    try:
        for _ in range(2):
            began = time.monotonic()
            result = await session.run(Run(code=code, echo=Echo.DISPLAY, files=files, fetch=run.fetch, limits=limits))
            assert time.monotonic() - began < SECONDS + 1 + BUSY, code
            assert result.seconds < SECONDS + 1, code
            assert BROKEN not in result.message, code  # no way to end the supervisor is known
            assert await is_right_or_gone(session), code
    finally:
        await session.close()
    result = await pool.run(run)
    assert BROKEN not in result.message, code
    assert (await pool.run(Run(code="print(1)"))).stdout == b"1\n"


async def test_a_forked_process_of_a_session_answers_no_later_call(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        for fork in ("os.fork()", "ctypes.CDLL(None).fork()"):
            await session.run(Run(code=f"import ctypes, os\nown = os.getpid()\n{fork}", limits=Limits(seconds=5)))
            for number in range(5):
                shown = await session.run(
                    Run(code=f"(os.getpid() == own, {number})", echo=Echo.DISPLAY, limits=Limits(seconds=2))
                )
                assert shown.display == f"(True, {number})" or shown.outcome is Outcome.TIMEOUT or session.restarts
    finally:
        await session.close()


async def test_what_a_cell_left_of_its_streams_is_not_the_next_ones(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        for change in ("import os; os.closerange(0, 3)", "import sys; sys.stdout = sys.stderr = sys.stdin = None"):
            first = await session.run(Run(code=f"print('first')\n{change}"))
            assert (first.outcome, first.stdout) in {(Outcome.OK, b"first\n"), (Outcome.OK, b"")}
            after = await session.run(Run(code="print(input())", stdin=b"second\n"))
            assert (after.outcome, after.stdout) == (Outcome.OK, b"second\n")
            assert session.restarts == 0
    finally:
        await session.close()


async def test_a_session_that_ended_between_two_calls_says_so(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        code = "import os\nown = os.getpid()\nif os.fork() == 0:\n    os.kill(own, 9); os._exit(0)"
        result = await session.run(Run(code=code))
        while not session.restarts:
            result = await session.run(Run(code=code))
        assert result.outcome in {Outcome.SIGNAL, Outcome.NONZERO_EXIT}
        assert result.message == GONE or result.outcome is Outcome.SIGNAL
        assert (await session.run(Run(code="print(1)"))).stdout == b"1\n"
    finally:
        await session.close()


@pytest.mark.parametrize("size", [70_000, 1_000_000])
async def test_a_long_exception_or_value_keeps_the_session(pool: SandboxPool, size: int) -> None:
    session = await pool.session()
    try:
        await session.run(Run(code="x = 1"))
        raised = await session.run(Run(code=f"raise Exception('\\U0001F600' * {size})"))
        assert (raised.outcome, (raised.error or {})["type"]) == (Outcome.NONZERO_EXIT, "Exception")
        shown = await session.run(Run(code=f"'\\x01\\u00e9' * {size}", echo=Echo.DISPLAY))
        assert shown.outcome is Outcome.OK
        assert len((shown.display or "").encode()) <= reports.LONGEST_TEXT
        assert (await session.run(Run(code="x", echo=Echo.DISPLAY))).display == "1"
    finally:
        await session.close()


def supervisors(pool: SandboxPool) -> list[int]:
    """Processes 1 of the sandboxes of a pool: below the zygote, below each leader."""
    assert isinstance(pool._backend, Zygote)

    def below(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    (zygote,) = below(pool._backend._process.pid)
    return [process for leader in below(zygote) for process in below(leader)]


async def test_a_supervisor_that_the_node_kills_is_a_failure_of_the_sandbox() -> None:
    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=1))
    try:
        session = await pool.session()
        await session.run(Run(code="x = 1"))
        running = asyncio.create_task(session.run(Run(code="import time; time.sleep(60)", limits=Limits(seconds=60))))
        await asyncio.sleep(0)
        for process in supervisors(pool):
            os.kill(process, signal.SIGKILL)
        with pytest.raises(SlotLost):
            await running
        assert (await pool.run(Run(code="print(1)"))).stdout == b"1\n"
    finally:
        await pool.close()


async def test_runs_in_a_back_end_that_dies_are_run_again() -> None:
    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=4))
    try:
        for _ in range(3):
            running = [asyncio.create_task(pool.run(Run(code="import time; time.sleep(.2)"))) for _ in range(4)]
            while pool.running < 4:  # noqa: ASYNC110 - a plain number of the pool
                await asyncio.sleep(0)
            assert isinstance(pool._backend, Zygote)
            pool._backend._process.kill()
            assert {result.outcome for result in await asyncio.gather(*running)} == {Outcome.OK}
    finally:
        await pool.close()


@pytest.fixture
def outside() -> list[bool]:
    """What the back-end of `slot` says: whether somebody outside of the sandbox has ended it."""
    return [False]


@pytest_asyncio.fixture(loop_scope="module")
async def slot(outside: list[bool]) -> AsyncIterator[tuple[SandboxSlot, asyncio.StreamWriter, asyncio.StreamReader]]:
    """A slot, and the sandbox's end of its connection."""
    ours, theirs = slots.slot_sockets()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    far_reader, far_writer = await asyncio.open_unix_connection(sock=theirs)

    async def from_outside() -> bool:
        return outside[0]

    yield SandboxSlot(1, reader, writer, ended_from_outside=from_outside), far_writer, far_reader
    for opened in (writer, far_writer):
        opened.close()
        with suppress(ConnectionError):
            await opened.wait_closed()


Ends = tuple[SandboxSlot, asyncio.StreamWriter, asyncio.StreamReader]


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 8, frames.PREFIX.pack(2, 0) + b"}{", frames.PREFIX.pack(9, 0)])
async def test_an_end_without_an_answer_is_the_codes_but_for_evidence_from_outside(slot: Ends, garbage: bytes) -> None:
    place, supervisor, _ = slot
    supervisor.write(frames.encode({"kind": "started"}) + garbage)
    supervisor.close()
    result = await place.run(Run(code="x"), session=False)
    assert (result.outcome, result.message, place.usable) == (Outcome.POLICY_DENIED, BROKEN, False)


@pytest.mark.parametrize("started", [True, False])
async def test_an_end_from_outside_or_before_the_code_is_the_sandboxs(
    slot: Ends, outside: list[bool], started: bool
) -> None:
    place, supervisor, _ = slot
    outside[0] = started
    supervisor.write(frames.encode({"kind": "started"}) if started else b"")
    supervisor.close()
    with pytest.raises(SlotLost):
        await place.run(Run(code="x"), session=False)


async def test_a_sandbox_that_does_not_answer_is_its_codes_timeout(slot: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GRACE_SECONDS", 0.1)
    place, supervisor, _ = slot
    supervisor.write(frames.encode({"kind": "started"}))
    result = await place.run(Run(code="x", limits=Limits(seconds=0.1)), session=True)
    assert (result.outcome, place.alive, place.usable) == (Outcome.TIMEOUT, False, False)


async def test_a_sandbox_that_does_not_start_fails(slot: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GRACE_SECONDS", 0.1)
    place, supervisor, _ = slot
    with pytest.raises(SandboxFailure) as failed:
        await place.run(Run(code="x", limits=Limits(seconds=0.1)), session=False)
    assert failed.value.code == "sandbox_stuck"
    assert not supervisor.is_closing()


async def test_a_process_that_cannot_be_prepared_is_a_failure(slot: Ends) -> None:
    place, supervisor, _ = slot
    supervisor.write(frames.encode({"kind": "unprepared", "reason": "no rights", "alive": False}))
    with pytest.raises(SandboxFailure, match="no rights") as failed:
        await place.run(Run(code="x"), session=False)
    assert failed.value.code == "sandbox_unprepared"


async def test_every_request_and_answer_that_is_allowed_fits_a_message(pool: SandboxPool) -> None:
    paths = [f"{number:03}" + "\x01" * 250 + "/" + "\udcff" * 250 + "/" + "\x02" * 250 for number in range(256)]
    files = dict.fromkeys((f"{number:03}" + "\x01" * 200 for number in range(200)), b"x")
    result = await pool.run(Run(code="print(1)", files=files, fetch=paths))
    assert (result.outcome, result.stdout) == (Outcome.OK, b"1\n")
    assert set(result.missing) == set(paths)


async def test_a_report_is_read_by_its_form_alone() -> None:
    number = reports.new_number()
    error = {"type": "T" * 999, "text": "\x00\ud800" * 99_999, "traceback": "\U0001f600" * 99_999}
    for ended in (Ended(7, True), Ended(display="é" * 99_999), Ended(1, error=error)):
        packet = reports.encode(ended, number)
        assert len(packet) <= reports.MAX_PACKET
        found = reports.decode(packet, number)
        assert found is not None
        assert (found.status, found.memory, found.display is None) == (
            ended.status,
            ended.memory,
            ended.display is None,
        )
        assert reports.decode(packet, reports.new_number()) is None
        draw = random.Random(1)
        for _ in range(300):
            changed = bytearray(packet[: draw.randrange(len(packet) + 1)])
            for _ in range(draw.randrange(4)):
                if changed:
                    changed[draw.randrange(min(40, len(changed)))] = draw.randrange(256)
            reports.decode(bytes(changed), number)  # whatever it is, it raises nothing


async def test_a_session_of_bubblewrap_that_its_code_ends_starts_anew() -> None:
    try:
        pool = await SandboxPool.start(Bubblewrap.start, PoolConfig(max_sandboxes=1))
    except SandboxFailure as error:
        pytest.skip(f"no bubblewrap on this node: {error}")
    try:
        session = await pool.session()
        for end in ("import os; os._exit(0)", "while True: pass"):
            await session.run(Run(code=end, limits=Limits(seconds=0.3)))
            assert (await session.run(Run(code="print(1)"))).stdout == b"1\n"
        assert session.restarts == 2
        await session.close()
    finally:
        await pool.close()
