"""What a run of code returns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kestrl.errors import Boundary, UserInputError
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import (
    Isolation,
    Language,
    Limits,
    Outcome,
    Run,
    SandboxBusy,
    SandboxFailure,
)
from kestrl_sandbox.pool.breaker import FAILURES, Breaker
from kestrl_sandbox.pool.sandbox_pool import SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


def bash(code: str, **options: object) -> Run:
    return Run(code=code, language=Language.BASH, **options)  # type: ignore[arg-type]


OUTCOMES = {
    "ok": (Run(code="print(6 * 7)"), Outcome.OK, 0, b"42\n"),
    "exit status": (Run(code="import sys\nprint('x')\nsys.exit(7)"), Outcome.NONZERO_EXIT, 7, b"x\n"),
    "exit with text": (Run(code="raise SystemExit('no')"), Outcome.NONZERO_EXIT, 1, b""),
    "os._exit": (Run(code="import os; os._exit(9)"), Outcome.NONZERO_EXIT, 9, b""),
    "exception": (Run(code="1 / 0"), Outcome.NONZERO_EXIT, 1, b""),
    "syntax error": (Run(code="def"), Outcome.NONZERO_EXIT, 1, b""),
    "signal": (Run(code="import os; os.kill(os.getpid(), 9)"), Outcome.SIGNAL, None, b""),
    "segmentation fault": (Run(code="import ctypes; ctypes.string_at(0)"), Outcome.SIGNAL, None, b""),
    "abort": (Run(code="import os; os.abort()"), Outcome.SIGNAL, None, b""),
    "memory": (Run(code="x = bytearray(10**9)", limits=Limits(memory_mb=64)), Outcome.OUT_OF_MEMORY, 1, b""),
    "policy": (bash("echo a; exec unshare -r true"), Outcome.POLICY_DENIED, None, b"a\n"),
    "policy in a child": (bash("unshare -r true"), Outcome.POLICY_DENIED, None, b""),
    "bash": (bash("read line; echo got $line; exit 3", stdin=b"this\n"), Outcome.NONZERO_EXIT, 3, b"got this\n"),
    "standard input": (Run(code="print(input() + '!')", stdin="é\n".encode()), Outcome.OK, 0, "é!\n".encode()),
    "no standard input": (Run(code="input()"), Outcome.NONZERO_EXIT, 1, b""),
    "thread": (
        Run(code="import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('t'))).start()"),
        Outcome.OK,
        0,
        b"t\n",
    ),
    "exit handler": (Run(code="import atexit; atexit.register(print, 'bye')"), Outcome.OK, 0, b"bye\n"),
    "main": (Run(code="if __name__ == '__main__': print(__name__)"), Outcome.OK, 0, b"__main__\n"),
    "subprocess": (
        Run(code="import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)"),
        Outcome.OK,
        0,
        b"b'hi\\n'\n",
    ),
    "multiprocessing": (
        Run(code="import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))"),
        Outcome.OK,
        0,
        b"[1, 2]\n",
    ),
    "long script": (bash("echo a\n" + "#" * 200_000), Outcome.OK, 0, b"a\n"),
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_outcome(pool: SandboxPool, name: str) -> None:
    run, outcome, code, stdout = OUTCOMES[name]
    result = await pool.run(run)
    assert (result.outcome, result.exit_code, result.stdout) == (outcome, code, stdout), result
    assert bool(result.message) == (outcome is not Outcome.OK)


async def test_a_traceback_shows_the_code(pool: SandboxPool) -> None:
    result = await pool.run(Run(code="def f():\n    return undefined_name\n\nf()"))
    text = result.stderr.decode()
    assert 'File "/work/main.py", line 2, in f' in text
    assert "return undefined_name" in text
    assert "kestrl" not in text


async def test_a_timeout_keeps_the_output_and_ends_at_the_limit(pool: SandboxPool) -> None:
    code = "import os, time\nprint('begun', flush=True)\nif os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    started = time.monotonic()
    result = await pool.run(Run(code=code, limits=Limits(seconds=1.0)))
    assert (result.outcome, result.stdout, result.exit_code) == (Outcome.TIMEOUT, b"begun\n", None)
    assert 1.0 <= result.seconds < 30
    assert time.monotonic() - started < 30, "waited for a process that the run left"
    assert "1 s" in result.message


async def test_output_is_read_to_its_end_and_cut_with_a_flag(pool: SandboxPool) -> None:
    code = "import os\nfor _ in range(80): os.write(1, b'x' * 65536)\nos.write(2, b'y' * 99)\nprint('end')"
    result = await pool.run(Run(code=code, limits=Limits(output_bytes=1000)))
    assert (result.outcome, result.stdout, result.stdout_truncated) == (Outcome.OK, b"x" * 1000, True)
    assert (result.stderr, result.stderr_truncated, result.truncated) == (b"y" * 99, False, True)


async def test_a_megabyte_of_input_and_output_passes(pool: SandboxPool) -> None:
    data = bytes(range(256)) * 4000
    result = await pool.run(bash("cat; cat >&2 in.bin", stdin=data, files={"in.bin": data}))
    assert result.stdout == result.stderr == data


async def test_files_go_in_and_come_back(pool: SandboxPool) -> None:
    run = Run(
        code="import os\nopen('out/b.txt', 'w').write(open('in/a.txt').read() * 2)\nos.mkfifo('pipe')\nos.mkdir('d')",
        files={"in/a.txt": b"a", "out/x": b"", "/tmp/t": b"t"},
        fetch=["out/b.txt", "/tmp/t", "none", "/etc/passwd", "pipe", "d"],
    )
    result = await pool.run(run)
    assert result.files == {"out/b.txt": b"aa", "/tmp/t": b"t"}
    assert set(result.missing) == {"none", "/etc/passwd", "pipe", "d"}


async def test_a_link_is_not_followed_when_files_are_read(pool: SandboxPool) -> None:
    code = "ln -s /etc/passwd a; ln -s / d; ln -s /proc/self/environ p; ln -s /proc/1/root r"
    fetch = ["a", "d/etc/passwd", "p", "r/etc/passwd"]
    result = await pool.run(bash(code, fetch=fetch))
    assert (result.outcome, result.files) == (Outcome.OK, {})
    assert set(result.missing) == set(fetch)


async def test_a_link_is_not_followed_when_files_are_written(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        await session.run(bash("ln -s /dev/shm/elsewhere link; ln -s /dev/shm folder"))
        for path in ("link", "folder/x"):
            result = await session.run(Run(code="print(1)", files={path: b"x"}))
            assert (result.outcome, path in result.message) == (Outcome.POLICY_DENIED, True)
        assert (await session.run(bash("ls /dev/shm"))).stdout == b""
    finally:
        await session.close()


async def test_modes_of_files_are_kept_to(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        result = await session.run(bash("echo x > f; chmod 000 f", fetch=["f"]))
        assert "Permission denied" in result.missing["f"]
        result = await session.run(Run(code="", files={"f": b"y"}))
        assert (result.outcome, "Permission denied" in result.message) == (Outcome.POLICY_DENIED, True)
    finally:
        await session.close()


@pytest.mark.parametrize(
    "run",
    [
        Run(code="", files={"../x": b""}),
        Run(code="", files={"a\0b": b""}),
        Run(code="", fetch=["a/../../b"]),
        Run(code="", fetch=["x" * 5000]),
        Run(code="", files={"": b""}),
        Run(code="x" * 5_000_000),
        Run(code="", limits=Limits(seconds=0)),
        Run(code="", limits=Limits(memory_mb=100_000)),
        Run(code="", fetch=["a\ud800"]),
        Run(code="", limits=Limits(output_bytes=-5)),
        Run(code="", limits=Limits(output_bytes=1 << 40)),
        Run(code="", limits=Limits(file_bytes=-1)),
    ],
)
async def test_an_unusable_request_names_its_field(pool: SandboxPool, run: Run) -> None:
    with pytest.raises(UserInputError, match=r"^(code|files|fetch|seconds|memory_mb|output_bytes|file_bytes): "):
        await pool.run(run)


async def test_a_path_elsewhere_is_denied(pool: SandboxPool) -> None:
    result = await pool.run(Run(code="print(1)", files={"/etc/x": b""}))
    assert (result.outcome, result.stdout) == (Outcome.POLICY_DENIED, b"")
    assert "/etc/x" in result.message


async def test_a_session_keeps_its_state(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        assert (await session.run(Run(code="import math\nx = 1"))).outcome is Outcome.OK
        assert (await session.run(bash("echo file > f; false"))).exit_code == 1
        result = await session.run(Run(code="x += 1; print(x, math.pi > 3, open('f').read().strip())"))
        assert result.stdout == b"2 True file\n"
        assert (await session.run(Run(code="import sys; sys.exit(4)"))).exit_code == 4
        assert (await session.run(Run(code="print(x)"))).stdout == b"2\n"
    finally:
        await session.close()


async def test_each_run_of_a_session_has_its_own_standard_input(pool: SandboxPool) -> None:
    session = await pool.session()
    try:
        for text in (b"one\n", b"two\n"):
            assert (await session.run(bash("cat; cat", stdin=text))).stdout == text
            assert (await session.run(Run(code="print(input(), end='')", stdin=text))).stdout == text.strip()
            assert (await session.run(Run(code="import sys; print(sys.stdin.read() == '')"))).stdout == b"True\n"
        data = b"x" * 3_000_000
        assert (await session.run(bash("wc -c", stdin=data))).stdout.strip() == b"3000000"
        assert (await session.run(Run(code="print(1)", stdin=data))).stdout == b"1\n"
    finally:
        await session.close()


@pytest.mark.parametrize("end", ["while True: pass", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"])
async def test_a_session_whose_process_ends_starts_anew(pool: SandboxPool, end: str) -> None:
    session = await pool.session()
    try:
        await session.run(Run(code="x = 1"))
        await session.run(Run(code=end, limits=Limits(seconds=0.3)))
        assert session.restarts == 1
        assert (await session.run(Run(code="print('x' in globals())"))).stdout == b"False\n"
    finally:
        await session.close()
    with pytest.raises(SandboxFailure, match="closed"):
        await session.run(Run(code=""))


async def test_random_numbers_differ_between_runs(pool: SandboxPool) -> None:
    drawn = {(await pool.run(Run(code="import random; print(random.random())"))).stdout for _ in range(3)}
    assert len(drawn) == 3


async def test_a_cancelled_run_is_ended(pool: SandboxPool) -> None:
    task = asyncio.create_task(pool.run(Run(code="import time; time.sleep(60)", limits=Limits(seconds=60))))
    while not pool.running:  # noqa: ASYNC110 - a plain number of the pool
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.running == 0
    assert (await pool.run(Run(code="print(1)"))).stdout == b"1\n"


async def test_runs_beyond_the_queue_are_refused() -> None:
    small = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=1, max_waiting=1))
    try:
        slow = Run(code="import time; time.sleep(.3)")
        running, waiting = asyncio.create_task(small.run(slow)), asyncio.create_task(small.run(slow))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(SandboxBusy) as refused:
            await small.run(slow)
        assert (refused.value.boundary, refused.value.retryable) == (Boundary.SANDBOX, True)
        assert {result.outcome for result in await asyncio.gather(running, waiting)} == {Outcome.OK}
    finally:
        await small.close()
    with pytest.raises(SandboxFailure, match="closed"):
        await small.run(Run(code=""))


async def test_a_dead_zygote_is_replaced(pool: SandboxPool) -> None:
    zygote = pool._backend
    assert zygote is not None
    zygote._process.kill()
    await asyncio.to_thread(zygote._process.wait)
    assert (await pool.run(Run(code="print(1)"))).stdout == b"1\n"


async def test_nothing_outlives_the_service(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from kestrl_sandbox.config import PoolConfig\n"
        "from kestrl_sandbox.contract import Run\n"
        "from kestrl_sandbox.pool.sandbox_pool import SandboxPool\n"
        "from kestrl_sandbox.backends.zygote import Zygote\n"
        "async def main():\n"
        "    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=2))\n"
        "    print(pool._backend._process.pid, flush=True)\n"
        "    await pool.run(Run(code='import time; time.sleep(600)'))\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220 - it is read and killed
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        zygote = Path("/proc") / service.stdout.readline().strip()
        below = [zygote, *children(zygote.name)]
        assert len(below) > 1
        service.kill()
    deadline = time.monotonic() + 30
    while any(path.exists() and "Z" not in state(path) for path in below):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def children(pid: str) -> list[Path]:
    return [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(process: Path) -> str:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2]
    except OSError:
        return "Z"


async def test_what_cannot_start_is_an_error_of_the_node() -> None:
    with pytest.raises(SandboxFailure, match="no_such_module") as raised:
        await SandboxPool.start(Zygote.start, PoolConfig(preload=("no_such_module",)))
    assert raised.value.code == "sandbox_unavailable"


async def test_the_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.check()
        breaker.failed()
    with pytest.raises(SandboxFailure, match="in a row"):
        breaker.check()


async def test_capabilities_name_what_is_isolated(pool: SandboxPool) -> None:
    found = pool.capabilities
    assert (found.backend, found.isolation) == ("zygote", Isolation.NAMESPACES)
    assert {"namespaces", "seccomp", "landlock", "memory", "network", "root"} <= set(found.mechanisms)


FORGED = {
    "half a message": "os.write(3, (1 << 19).to_bytes(4, 'big') + bytes(4))",
    "a message too long": "os.write(3, b'\\xff' * 8)",
    "no object": "os.write(3, (2).to_bytes(4, 'big') + bytes(4) + b'[]')",
    "fields of other types": "os.write(3, (27).to_bytes(4, 'big') + bytes(4) + "
    'b\'{"status":"x","error":[]}\'.ljust(27))',
    "no JSON": "os.write(3, (2).to_bytes(4, 'big') + bytes(4) + b'}{')",
    "nothing any more": "os.close(3)",
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_end_of_a_cell_is_no_failure_of_the_sandbox(pool: SandboxPool, name: str) -> None:
    session = await pool.session()
    try:
        code = f"import os, time\n{FORGED[name]}\ntime.sleep(60)"
        result = await session.run(Run(code=code, limits=Limits(seconds=0.3)))
        assert result.outcome in {Outcome.TIMEOUT, Outcome.NONZERO_EXIT}
    finally:
        await session.close()
