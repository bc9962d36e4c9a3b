"""The engines that serve each version, with a revision: what running groups are to know of changes. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kestrl._shared.plan.settings.learner import EngineEntry
from kestrl.episode import PolicyVersion
from kestrl_learner.concurrency import Listeners


class Serving:
    """The engines of every live version."""

    def __init__(self) -> None:
        self.revision = time.time_ns()
        """Grows with every change, also over a restart of the learner."""
        self.engines: Mapping[PolicyVersion, Sequence[EngineEntry]] = {}
        self.newest: PolicyVersion | None = None
        """The newest version that an engine has served; groups that continue over updates sample from it."""
        self.changes = Listeners()

    def update(self, engines: Mapping[PolicyVersion, Sequence[EngineEntry]]) -> None:
        """Replaces the engines of every version."""
        if engines != self.engines:
            self.engines = engines
            served = [policy for policy, entries in engines.items() if entries or policy == self.newest]
            self.newest = max(served, key=lambda policy: policy.step, default=None)
            self.revision += 1
            self.changes.notify()
