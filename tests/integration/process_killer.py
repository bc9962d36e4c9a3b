"""A seeded process killer: sends SIGKILL to a run's processes at named moments, and records it.

It only uses the files in the folder of the run, such as `run.json`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from kestrl._app.local.rundir import RunDir
from kestrl._app.local.runner_record import ComponentRecord
from kestrl._shared.processes.process_guard import children
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase

POLL_SECONDS = 0.002
PATIENCE_SECONDS = 4.0
"""A moment of the training may be too short to be caught; then the kill comes at any other of it."""
COMPONENTS = ("learner-0", "rollout-0", "tools-0", "judge-0", "inference-0", "engine-0", "runner")


class Moment(StrEnum):
    """A moment of a run that is observable from outside."""

    STARTING = "starting"
    BEFORE = "first evaluation"
    ROLLOUTS = "rollouts"
    UPDATE = "update"
    PUBLISHING = "publishing"
    PROVING = "proving"
    CHECKPOINT = "checkpoint"
    AFTER = "last evaluation"
    ANY = "any"


TRAINING = (Moment.ROLLOUTS, Moment.UPDATE, Moment.PUBLISHING, Moment.PROVING, Moment.CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned or executed kill."""

    victim: str
    moment: Moment
    delay: float = 0.0
    """Seconds after the moment."""


def schedule(seed: int, *, rounds: int) -> list[Kill]:
    """Every component at the start and at both evaluations, and `rounds` times each at moments of training; order and
    delays drawn."""
    chance = random.Random(seed)

    def shuffled(moment: Moment | None, delay: float) -> list[Kill]:
        kills = [Kill(name, moment or chance.choice(TRAINING), chance.random() * delay) for name in COMPONENTS]
        chance.shuffle(kills)
        return kills

    kills = shuffled(Moment.STARTING, 5.0) + shuffled(Moment.BEFORE, 0.5)
    for _ in range(rounds):
        kills += shuffled(None, 0.3)
    return kills + shuffled(Moment.AFTER, 0.5)


@dataclass
class Killer:
    """Carries out a schedule on one run."""

    run: RunDir
    kills: list[Kill]
    done: list[Kill] = field(default_factory=list[Kill])

    def next(self, alive: Callable[[], bool], runner: int) -> Kill | None:
        """Carries out the next kill; None when the run ended before its moment came, or there is none left."""
        if not self.kills:
            return None
        kill = self.kills[0]
        patience = time.monotonic() + PATIENCE_SECONDS
        while not self._has_come(kill.moment):
            if not alive():
                return None
            if self._is_past(kill.moment) or (kill.moment in TRAINING and time.monotonic() > patience):
                kill = replace(kill, moment=Moment.ANY)
                break
            if self._state().activity.phase is not RunPhase.TRAINING:
                patience = time.monotonic() + PATIENCE_SECONDS
            time.sleep(POLL_SECONDS)
        time.sleep(kill.delay)
        pid = runner if kill.victim == "runner" else self._pid(kill.victim)
        if pid is None:
            return kill  # still dead from its last kill; retried later
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.done.append(kill)
            self.kills.pop(0)
        return kill

    def counts(self) -> Mapping[str, int]:
        return Counter(kill.victim for kill in self.done)

    def _pid(self, name: str) -> int | None:
        """Pid of the component: the only child of the process guard in `run.json`."""
        guard = self._components().get(name)
        return next(iter(children(guard.pid)), None) if guard is not None and guard.pid else None

    def _components(self) -> Mapping[str, ComponentRecord]:
        record = self.run.record()
        return {} if record is None else record.components

    def _state(self) -> RunState:
        record = self.run.record()
        return RunState() if record is None or record.state is None else record.state

    def _has_come(self, moment: Moment) -> bool:
        state = self._state()
        phase, step = state.activity.phase, state.steps.done
        if moment is Moment.STARTING:
            return phase is RunPhase.STARTING and bool(self._components())
        if moment is Moment.BEFORE:
            return phase is RunPhase.EVALUATING and step == 0
        if moment is Moment.AFTER:
            return phase is RunPhase.EVALUATING and step == state.steps.total
        if phase is not RunPhase.TRAINING:
            return False
        adapters = {folder: (folder / "manifest.json").exists() for folder in self._folders("adapters")}
        if moment is Moment.PUBLISHING:
            return not all(adapters.values())
        if moment is Moment.PROVING:
            return max((int(folder.name[:6]) for folder in adapters), default=0) > _version(state)
        if moment is Moment.CHECKPOINT:
            return any(not (folder / "manifest.json").exists() for folder in self._folders("checkpoints"))
        running = state.gauges.groups_running
        return running > 0 if moment is Moment.ROLLOUTS else running == 0

    def _is_past(self, moment: Moment) -> bool:
        return moment in {Moment.STARTING, Moment.BEFORE} and self._state().activity.phase is RunPhase.TRAINING

    def _folders(self, name: str) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from (self.run.path / name).iterdir()


def _version(state: RunState) -> int:
    return -1 if state.policy.version is None else state.policy.version.step
