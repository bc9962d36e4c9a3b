"""Progress of the run, and the service that tells of it."""
# ruff: noqa: ARG002 - gRPC hands each method a request and a context

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs
from kestrl.episode import Episode, PolicyVersion
from kestrl.errors import Failure
from kestrl.rpc.codec import failure_to_proto, policy_to_proto
from kestrl_learner.learning import Learning
from kestrl_learner.stale import Stale

STEPS_SEEN = 2
"""Steps that the running means look back on, and so does who says that there is nothing to learn."""
FINAL = frozenset({"succeeded", "failed", "suspended"})
"""Phases that nothing follows in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine, as it was seen last."""

    name: str
    policy: PolicyVersion | None
    """The newest version it has proved."""
    lag: int
    """Steps behind the newest published version."""
    state: str
    """starting, serving, loading, recovering, quarantined or away."""
    message: str
    """Why it is behind, as far as is known."""


def episode_facts(episode: Episode) -> dict[str, float]:
    """What is averaged over episodes. Only of an episode that did not fail: a failure is never a number."""
    assert episode.reward is not None
    return {
        **episode.metrics,
        "reward": episode.reward,
        "num_turns": float(episode.num_turns),
        "duration": episode.seconds,
    }


def means_of(facts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each fact over those that have it."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for item in facts:
        for name, value in item.items():
            sums[name] += value  # type: ignore[assignment]
            counts[name] += 1
    return {name: sums[name] / counts[name] for name in sums}


class Progress:
    """What is going on; watchers are woken by every change."""

    def __init__(self, total_steps: int, engines_total: int, episodes_per_step: int) -> None:
        self.phase, self.message = "starting", ""
        self.step, self.total_steps = 0, total_steps
        self.policy: PolicyVersion | None = None
        self.policy_uri = self.policy_parent = ""
        self.engines: Sequence[EngineReport] = ()
        self.engines_converged, self.engines_total = 0, engines_total
        self.tokens_per_second = self.episodes_per_second = self.eta_seconds = 0.0
        self.checkpoint_step: int | None = None
        """Of the newest checkpoint that was read back from storage."""
        self.storage_failure = ""
        """What storage refused last, until a checkpoint is in it."""
        self.storage_wait = ""
        """That storage does not answer and is waited for, with the reason."""
        self.failures: Counter[str] = Counter()
        self.skipped: set[tuple[str, int]] = set()
        """Rows whose prompts leave no room in the context, by data set and ordinal."""
        self.failure: Failure | None = None
        self.stale, self.stale_in_step = Stale(), Stale()
        """Groups given up as too old: of the run, and since the last step."""
        self.groups_running = self.groups_ready = self.workers = 0
        self.publish_seconds = 0.0
        self.probe_distance: float | None = None
        """Between the newest version and the one before, once this process has published two that can be compared."""
        self.learning: Learning | None = None
        """Whether anything was learned yet, once that can be said."""
        self.last_step: Mapping[str, Any] = {}
        """What `metrics/` holds of the last step."""
        self._recent: deque[dict[str, float]] = deque(maxlen=STEPS_SEEN * episodes_per_step)
        self._idle: deque[bool] = deque(maxlen=STEPS_SEEN)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False
        """Whether watchers are let go: nothing more is to be told."""

    @property
    def final(self) -> bool:
        """Whether the run has ended, and how is told."""
        return self.phase in FINAL

    def end(self) -> None:
        """Lets the watchers go, once they have been told the last state."""
        self.ended = True
        self.update()

    def update(self, **facts: Any) -> None:
        """Takes facts in and wakes the watchers."""
        for name, value in facts.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Takes the running loop as the one whose watchers `update_soon` wakes."""
        self._loop = asyncio.get_running_loop()

    def update_soon(self, **facts: Any) -> None:
        """`update` from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody watches any more
            self._loop.call_soon_threadsafe(partial(self.update, **facts))

    def count_failure(self, failure: Failure) -> None:
        self.failures[f"{failure.boundary}/{failure.code}"] += 1
        self.update()

    def gave_up(self, *, age: int, seconds: float, tokens: int) -> None:
        """A group had grown too old to be trained on."""
        for count in (self.stale, self.stale_in_step):
            count.add(age=age, seconds=seconds, tokens=tokens)

    def skip(self, data_set: str, ordinal: int) -> None:
        """A row cannot be attempted, since its prompt leaves no room in the context."""
        self.skipped.add((data_set, ordinal))
        self.update()

    def add(self, episodes: Iterable[Episode]) -> None:
        """Episodes that were scored."""
        self._recent.extend(episode_facts(episode) for episode in episodes if episode.reward is not None)
        self.update()

    def stepped(self, *, idle: bool) -> None:
        """A step was done; `idle` when no group of it had an advantage."""
        self._idle.append(idle)

    @property
    def degenerate(self) -> bool:
        """Whether there was nothing to learn from in the last steps."""
        return len(self._idle) == STEPS_SEEN and all(self._idle)

    def recent(self) -> list[dict[str, float]]:
        """Facts of the last episodes. May be asked from any thread."""
        return list(self._recent)

    async def changed(self) -> None:
        """Until the next change."""
        await self._changed.wait()

    def message_now(self) -> pb.WatchProgressResponse:
        return pb.WatchProgressResponse(
            phase=self.phase,
            step=self.step,
            total_steps=self.total_steps,
            means=means_of(self.recent()),
            policy=policy_to_proto(self.policy),
            engines_converged=self.engines_converged,
            engines_total=self.engines_total,
            tokens_per_second=self.tokens_per_second,
            eta_seconds=self.eta_seconds,
            failures=dict(self.failures),
            skipped_rows=len(self.skipped),
            failure=None if self.failure is None else failure_to_proto(self.failure),
            message=self.message,
            groups_running=self.groups_running,
            engines=[_engine_to_proto(engine) for engine in self.engines],
            checkpoint_step=self.checkpoint_step,
            policy_uri=self.policy_uri,
            policy_parent=self.policy_parent,
            episodes_per_second=self.episodes_per_second,
            workers=self.workers,
            groups_ready=self.groups_ready,
            degenerate=self.degenerate,
            storage_failure=self.storage_failure,
            storage_wait=self.storage_wait,
            learned=None if self.learning is None else self.learning.learned,
            not_learned_reason="" if self.learning is None else self.learning.reason,
            not_learned="" if self.learning is None else self.learning.message,
        )


def _engine_to_proto(engine: EngineReport) -> pb.EngineProgress:
    return pb.EngineProgress(
        name=engine.name,
        policy=policy_to_proto(engine.policy),
        lag=engine.lag,
        state=engine.state,
        message=engine.message,
    )


class LearnerServicer(stubs.LearnerServiceServicer):
    """Tells of the progress and takes the order to drain."""

    def __init__(self, progress: Progress, drain: Callable[[], None]) -> None:
        self._progress, self._drain = progress, drain

    async def WatchProgress(
        self,
        request: pb.WatchProgressRequest,
        context: Any,
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        progress, told = self._progress, None
        while True:
            # No await lies between looking and waiting for the next change, so none slips through while one is told. Compared as
            # bytes: a mean that is no number equals itself there.
            while (seen := (message := progress.message_now()).SerializeToString(deterministic=True)) == told:
                if progress.ended:
                    return
                await progress.changed()
            told, next_at = seen, asyncio.get_running_loop().time() + request.min_interval_seconds
            yield message
            if request.min_interval_seconds > 0:
                await self._hold(next_at)

    async def _hold(self, until: float) -> None:
        """Until a time of the loop's clock, or the run's end."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not (self._progress.final or self._progress.ended):
                    await self._progress.changed()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._drain()
        return pb.DrainResponse()
