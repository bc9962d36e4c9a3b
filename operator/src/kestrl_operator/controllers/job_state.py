"""What this process remembers of each job between passes.

Nothing here is needed for a correct pass: another leader starts without it, and renders, asks or waits once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kestrl._shared.spec import AgentRLJob
from kestrl_operator.controllers.learner_stream import LearnerStream
from kestrl_operator.controllers.quota import QuotaMemory
from kestrl_operator.state.accelerators import Placement
from kestrl_operator.state.admission import QuotaRequest
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Memory
from kestrl_operator.state.store import OwnedObject


class ParsedManifest(NamedTuple):
    """One generation of a manifest, parsed: a job, or the error in it."""

    generation: int
    job: AgentRLJob | None
    problem: str
    accepted: str
    """The spec that objects are rendered from, to be stored once it is applied."""


class Fallback(NamedTuple):
    """The job that is in force where the newest spec is not."""

    generation: int
    accepted: str
    """The last accepted spec, which it was parsed from."""
    job: AgentRLJob | None


class Rendered(NamedTuple):
    """The inputs of the last rendering, and its digest; most passes need nothing else."""

    generation: int
    parked: bool
    attempts: int
    restarts: int
    forgiven: int
    queue: str | None
    placements: Mapping[str, Placement]
    fallback: bool
    """Whether the last accepted spec was rendered instead of the newest."""
    digest: str = ""
    children: frozenset[OwnedObject] = frozenset()
    """The watched ones among the objects."""


class Requested(NamedTuple):
    """The inputs of a job's last request for quota, and the request."""

    job: AgentRLJob
    queue: str
    priority_class: str
    request: QuotaRequest | None
    """None if it cannot be rendered."""


class Refusal(NamedTuple):
    """What the API server refused of one generation of a spec."""

    generation: int
    problem: str
    digest: str
    """Digest of the objects that were applied in part; empty where nothing was applied."""
    times: int
    """How often in a row it was refused."""
    until: float
    """When it is tried again."""


class Shortage(NamedTuple):
    """Too few pods of a running job."""

    since: float
    looked_up: float
    cause: str
    """The cause, as reported by the latest event; empty if no event reports one."""


@dataclass(slots=True, kw_only=True)
class JobState:
    """What is remembered of one job."""

    key: Key
    uid: str = ""
    """Uid of the job; empty before its first pass."""
    parsed: ParsedManifest | None = None
    fallback: Fallback | None = None
    rendered: Rendered | None = None
    refusal: Refusal | None = None
    drifted: bool = False
    """Whether an object was changed or deleted by another manager, so that all objects are applied again."""
    reapplied_at: float | None = None
    """When all objects were last applied again because pods did not start."""
    shortage: Shortage | None = None
    numbers_due: float = 0.0
    """From when on a status is written of which only numbers have changed, by the loop's clock."""
    requested: Requested | None = None
    quota: QuotaMemory = field(default_factory=QuotaMemory)
    memory: Memory | None = None
    """None before its first pass."""
    stream: LearnerStream | None = None
    """The progress stream of its learner, while there is one."""

    def refusal_of(self, generation: int) -> Refusal | None:
        """The last refusal of this generation."""
        return self.refusal if self.refusal is not None and self.refusal.generation == generation else None

    def refused_now(self, generation: int, now: float) -> str:
        """Why this generation cannot be applied, until it is tried again."""
        refusal = self.refusal_of(generation)
        return refusal.problem if refusal is not None and now < refusal.until else ""

    def stop_stream(self) -> None:
        """Stops following the learner."""
        if self.stream is not None:
            self.stream.task.cancel()
            self.stream = None


@dataclass(slots=True)
class JobStates:
    """The states of all jobs, by key."""

    changed: Callable[[Key], None]
    """Called when a learner reports."""
    _states: dict[Key, JobState] = field(default_factory=dict[Key, JobState])

    def of(self, key: Key, uid: str) -> JobState:
        """The state of a job; an empty one where it is another job of this name than before."""
        state = self._states.get(key)
        if state is None or state.uid not in {"", uid}:
            self.drop(key)
            state = self._states[key] = JobState(key=key)
        state.uid = uid
        return state

    def mark_drifted(self, key: Key) -> None:
        """Marks a job of which an object was changed or deleted by another manager, maybe before its first pass."""
        self._states.setdefault(key, JobState(key=key)).drifted = True

    def drop(self, key: Key) -> None:
        """Forgets a deleted job; Kubernetes deletes the objects that it owned."""
        state = self._states.pop(key, None)
        if state is not None:
            state.stop_stream()

    def follow(self, state: JobState, pod: str, address: str, token: Callable[[], str]) -> None:
        """Follows the learner in this pod, and stops following it in any other pod of the job. The token is derived for
        a new stream alone: most passes find theirs.
        """
        stream = state.stream
        if stream is None or (stream.pod, stream.address) != (pod, address):
            state.stop_stream()
            state.stream = LearnerStream(state.key, pod, address, token(), self.changed)

    @property
    def followed(self) -> int:
        """Number of learners that are followed."""
        return len(self._streams())

    async def close(self) -> None:
        """Stops following all learners."""
        tasks = [stream.task for stream in self._streams()]
        for task in tasks:
            task.cancel()
        self._states.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _streams(self) -> list[LearnerStream]:
        return [state.stream for state in list(self._states.values()) if state.stream is not None]
