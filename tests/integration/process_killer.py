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
from typing import Any

from kestrl._app.local.rundir import RunDir
from kestrl._shared.process_guard import children

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
            if self._reported("progress").get("phase") != "training":
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
        guard = self._reported("components").get(name, {}).get("pid", 0)
        return next(iter(children(guard)), None) if guard else None

    def _reported(self, part: str) -> dict[str, Any]:
        return (self.run.read_json("run.json") or {}).get(part) or {}

    def _has_come(self, moment: Moment) -> bool:
        progress = self._reported("progress")
        phase, step = progress.get("phase"), int(progress.get("step", 0))
        if moment is Moment.STARTING:
            return phase == "starting" and bool(self._reported("components"))
        if moment is Moment.BEFORE:
            return phase == "evaluating" and step == 0
        if moment is Moment.AFTER:
            return phase == "evaluating" and step == progress.get("total_steps")
        if phase != "training":
            return False
        adapters = {folder: (folder / "manifest.json").exists() for folder in self._folders("adapters")}
        if moment is Moment.PUBLISHING:
            return not all(adapters.values())
        if moment is Moment.PROVING:
            return max((int(folder.name[:6]) for folder in adapters), default=0) > _version(progress)
        if moment is Moment.CHECKPOINT:
            return any(not (folder / "manifest.json").exists() for folder in self._folders("checkpoints"))
        running = int(progress.get("groups_running", 0))
        return running > 0 if moment is Moment.ROLLOUTS else running == 0

    def _is_past(self, moment: Moment) -> bool:
        return moment in {Moment.STARTING, Moment.BEFORE} and self._reported("progress").get("phase") == "training"

    def _folders(self, name: str) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from (self.run.path / name).iterdir()


def _version(progress: Mapping[str, Any]) -> int:
    name = progress.get("policy")
    return -1 if name is None else int(str(name).split(".")[-2])
