"""The supervisor, with real processes: restarts, input errors, the learner's end, draining."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from kestrl._app.engines.store import VARIABLE as ENGINES
from kestrl._app.error_text import VARIABLE as ERRORS
from kestrl._app.local import supervisor
from kestrl._app.local.processes import Launcher, last_error
from kestrl._app.local.supervisor import BACKOFF, ComponentFailed, Supervisor
from kestrl._shared import engine_failure
from kestrl._shared.backoff import Backoff
from kestrl._shared.credentials import CALLS, Secret, held_by
from kestrl._shared.plan.components import Component, Role
from kestrl.errors import UserInputError
from kestrl.runstate.states import ComponentState

SLEEPER = "import time; time.sleep(600)"


def component(name: str, role: Role, *, module: str, restarts: bool = True) -> Component:
    return Component(name=name, role=role, module=module, restarts=restarts)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    for part in ("logs", "settings"):
        (tmp_path / part).mkdir()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    secrets = {secret.value: f"value of {secret}" for secret in Secret}
    return Launcher(folder=tmp_path, secrets=secrets, environment=environment)


def module(launcher: Launcher, name: str, code: str) -> str:
    (launcher.folder / f"{name}.py").write_text(code)  # the working directory is on the path, also of engines
    return name


def make(launcher: Launcher, *components: Component) -> Supervisor:
    return Supervisor(components, launcher, lambda: None)


async def test_the_learners_end_is_the_runs_end(launcher: Launcher) -> None:
    worker = component("rollout-0", Role.ROLLOUT, module=module(launcher, "sleeper", SLEEPER))
    learner = component(
        "learner-0", Role.LEARNER, module=module(launcher, "ends", "raise SystemExit(0)"), restarts=False
    )
    watched = make(launcher, worker, learner)
    assert await watched.run() == 0
    assert watched.observed["rollout-0"].state is ComponentState.ENDED
    assert watched.observed["rollout-0"].last_exit == 128 + 15


async def test_an_end_that_was_asked_for_is_no_error(launcher: Launcher) -> None:
    """An engine fails in its shutdown, and nothing was wrong before it was asked to end."""
    fails = dedent("""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("psutil met a zombie"))
        pathlib.Path("ready").touch()
        time.sleep(600)
    """)
    waits = "import pathlib, time\nwhile not pathlib.Path('ready').exists(): time.sleep(0.01)"
    engine = component("engine-0", Role.ENGINE, module=module(launcher, "fails", fails))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "waits", waits), restarts=False)
    watched = make(launcher, engine, learner)
    assert await asyncio.wait_for(watched.run(), 30) == 0
    ended = watched.observed["engine-0"].record()
    assert (ended.last_exit, ended.last_error) == (1, "")


async def test_bad_input_ends_the_run_with_its_message(launcher: Launcher) -> None:
    refuses = "import sys; print('error: tools[0].use: cannot import x', file=sys.stderr); sys.exit(2)"
    worker = component("tools-0", Role.TOOLS, module=module(launcher, "refuses", refuses))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "sleeper", SLEEPER), restarts=False)
    watched = make(launcher, worker, learner)
    with pytest.raises(UserInputError, match=r"tools\[0\].use: cannot import x"):
        await watched.run()
    assert watched.observed["learner-0"].state is ComponentState.ENDED


async def test_an_ended_component_is_restarted_even_after_status_0(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF", Backoff(0, 30))
    once = "import pathlib, time\nmark = pathlib.Path('mark')\nif mark.exists(): time.sleep(600)\nmark.touch()"
    ends = "import pathlib, time\nwhile pathlib.Path('settled').exists() is False: time.sleep(0.01)"
    engine = component("engine-0", Role.ENGINE, module=module(launcher, "once", once))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "waits", ends), restarts=False)
    watched = make(launcher, engine, learner)
    seen: list[int] = []

    def changed() -> None:
        engine_seen = watched.observed["engine-0"]
        seen.append(engine_seen.restarts)
        if engine_seen.restarts == 1 and engine_seen.state is ComponentState.RUNNING:
            (launcher.folder / "settled").touch()

    watched._changed = changed
    assert await asyncio.wait_for(watched.run(), 20) == 0
    assert watched.observed["engine-0"].restarts == 1


async def test_a_component_that_keeps_ending_fails_the_run(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF", Backoff(0, 30))
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 2)
    dies = "import sys; print('out of memory', file=sys.stderr); sys.exit(1)"
    engine = component("engine-0", Role.ENGINE, module=module(launcher, "dies", dies))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "sleeper", SLEEPER), restarts=False)
    with pytest.raises(ComponentFailed, match=r"engine-0 ended 3 times in a row \(exit status 1\): out of memory"):
        await make(launcher, engine, learner).run()


@pytest.mark.parametrize("victim", ["os.getpid()", "os.getppid()"])
async def test_a_killed_learner_is_restarted(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Itself, or the guard above it."""
    monkeypatch.setattr(supervisor, "BACKOFF", Backoff(0, 30))
    killed = (
        "import os, pathlib, time\nmark = pathlib.Path('mark')\n"
        f"if not mark.exists(): mark.touch(); os.kill({victim}, 9); time.sleep(600)"
    )
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "killed", killed), restarts=False)
    watched = make(launcher, learner)
    assert await asyncio.wait_for(watched.run(), 20) == 0
    assert watched.observed["learner-0"].restarts == 1


async def test_a_learner_that_fails_is_not_started_again(launcher: Launcher) -> None:
    fails = "raise SystemExit(1)"
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "fails", fails), restarts=False)
    watched = make(launcher, learner)
    assert await watched.run() == 1
    assert watched.observed["learner-0"].restarts == 0


async def test_draining_asks_the_learner_first(launcher: Launcher) -> None:
    drains = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(15, lambda *_: (pathlib.Path('drained').touch(), sys.exit(0)))\n"
        "pathlib.Path('up').touch()\ntime.sleep(600)"
    )
    worker = component("rollout-0", Role.ROLLOUT, module=module(launcher, "sleeper", SLEEPER))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "drains", drains), restarts=False)
    watched = make(launcher, worker, learner)
    running = asyncio.create_task(watched.run())
    async with asyncio.timeout(20):
        while not (launcher.folder / "up").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    watched.drain_learner()
    assert await running == 0
    assert (launcher.folder / "drained").exists()


@pytest.mark.parametrize("role", list(Role))
async def test_a_component_gets_its_own_credentials_only(launcher: Launcher, role: Role) -> None:
    """Those of this shell are nobody's, such as of a run that was started in an environment of another."""
    script = (
        "import os, json; print(json.dumps({key: os.environ[key] for key in os.environ if key.startswith('KESTRL_')}))"
    )
    assert set(CALLS) <= set(launcher.environment)
    running = await launcher.start(component(f"{role}-0", role, module=module(launcher, "script", script)))
    assert await running.wait() == 0
    seen = json.loads(launcher.log_path(f"{role}-0").read_text())
    for folder in (ENGINES, ERRORS):  # where something is kept is no secret
        seen.pop(folder, None)
    assert seen == {secret.value: launcher.secrets[secret.value] for secret in held_by(role)}


def test_backoff_doubles_up_to_a_bound() -> None:
    assert [BACKOFF.pause(number) for number in (1, 2, 3, 4, 5, 6, 9)] == [1, 2, 4, 8, 16, 30, 30]


def test_the_last_error_is_found_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_error(log) == ""
    log.write_text("x\nerror: first\ny\nerror: rows:\n  line 1\n  line 2\n")
    assert last_error(log) == "rows:\n  line 1\n  line 2"
    log.write_text("INFO started\nKilled\n")
    assert last_error(log) == "Killed"


def engine(launcher: Launcher, *, lasting: bool) -> Component:
    """An engine that writes why it does not start, counts its starts, and ends."""
    path = launcher.folder / "failure.json"
    failure = json.dumps({"message": "ValueError: the root cause", "lasting": lasting})
    code = f"""
        from pathlib import Path
        assert not Path({str(path)!r}).exists(), "what an earlier start wrote is gone"
        with Path({str(launcher.folder / "starts")!r}).open("a") as starts:
            starts.write("x")
        Path({str(path)!r}).write_text({failure!r})
        raise SystemExit(1)
    """
    named = component("engine-0", Role.ENGINE, module=module(launcher, "engine", dedent(code)))
    return replace(named, env={engine_failure.VARIABLE: str(path)})


async def test_an_engine_that_can_never_start_is_started_once(launcher: Launcher) -> None:
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "sleeper", SLEEPER), restarts=False)
    watched = make(launcher, engine(launcher, lasting=True), learner)
    with pytest.raises(ComponentFailed, match="engine-0 cannot start: ValueError: the root cause") as caught:
        await watched.run()
    assert caught.value.code == "engine_cannot_start"
    assert "engine-0.log" in str(caught.value)
    assert (launcher.folder / "starts").read_text() == "x"
    assert watched.observed["engine-0"].last_error == "ValueError: the root cause"


async def test_an_engine_that_may_start_later_is_started_again(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF", Backoff(0.01, 30))
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "sleeper", SLEEPER), restarts=False)
    watched = make(launcher, engine(launcher, lasting=False), learner)
    with pytest.raises(ComponentFailed, match=r"ended 6 times in a row .*: ValueError: the root cause"):
        await watched.run()
    assert (launcher.folder / "starts").read_text() == "x" * 6


async def test_what_joined_a_run_and_fails_does_not_end_it(launcher: Launcher) -> None:
    refuses = "import sys; print('error: no memory', file=sys.stderr); sys.exit(2)"
    learner = component("learner-0", Role.LEARNER, module=module(launcher, "sleeper", SLEEPER), restarts=False)
    watched = make(launcher, learner)
    failed = asyncio.Event()
    watched._changed = lambda: failed.set() if watched.observed["learner-0"].pid and _error_of(watched) else None
    running = asyncio.create_task(watched.run())
    watched.add(component("engine-1", Role.ENGINE, module=module(launcher, "refuses", refuses)))
    await asyncio.wait_for(failed.wait(), 20)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


def _error_of(watched: Supervisor) -> str:
    joined = watched.observed.get("engine-1")
    return "" if joined is None else joined.last_error
