"""Progress of the run, as watchers see it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kestrl._shared.rpc.codec import gathering_to_proto, run_phase_to_proto, sandboxes_to_proto, serving_state_to_proto
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode import Episode, Group, PolicyVersion
from kestrl.episode.codec import failure_to_proto, policy_to_proto
from kestrl.errors import Failure
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.states import RunPhase, ServingState
from kestrl.tools import SandboxInUse
from kestrl_learner.progress.learning import Learning
from kestrl_learner.progress.stale import Stale
from kestrl_learner.progress.tool_health import ToolHealth, ToolWarning

log = logging.getLogger(__name__)
WINDOW_STEPS = 2
"""Steps that the running means and the check for zero-advantage steps cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Last observed state of one engine."""

    name: str
    policy: PolicyVersion | None
    """The newest version it has verified."""
    lag: int
    """Steps behind the newest published version."""
    state: ServingState
    message: str
    """Why it does not serve the newest version; empty if that is not known."""


def episode_facts(episode: Episode) -> dict[str, float]:
    """The numbers of an episode that are averaged. Only for scored episodes: a failure is never a number."""
    assert episode.reward is not None
    return {
        **episode.metrics,
        "reward": episode.reward,
        "num_turns": float(episode.num_turns),
        "duration": episode.seconds,
    }


def means_of(facts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the episodes that have it."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for item in facts:
        for name, value in item.items():
            sums[name] += value  # type: ignore[assignment]
            counts[name] += 1
    return {name: sums[name] / counts[name] for name in sums}


class Progress:
    """State of the run as reported to watchers, which are woken by every change."""

    def __init__(
        self, total_steps: int, engines_total: int, episodes_per_step: int, *, offers_tools: bool = False
    ) -> None:
        self.phase, self.message = RunPhase.STARTING, ""
        self.step, self.total_steps = 0, total_steps
        self.policy: PolicyVersion | None = None
        self.policy_uri = self.policy_parent = ""
        self.engines: Sequence[EngineReport] = ()
        self.engines_converged, self.engines_total = 0, engines_total
        self.tokens_per_second = self.episodes_per_second = self.eta_seconds = 0.0
        self.checkpoint_step: int | None = None
        """Step of the newest checkpoint that was read back from storage."""
        self.storage_failure = ""
        """The last storage failure, until a checkpoint succeeds."""
        self.storage_wait = ""
        """Why storage is being waited for; empty if it is not."""
        self.failures: Counter[str] = Counter()
        self.skipped: set[tuple[str, int]] = set()
        """Rows whose prompts leave no room in the context, by data set and ordinal."""
        self.failure: Failure | None = None
        self.stale, self.stale_in_step = Stale(), Stale()
        """Groups released as too old: over the run, and since the last step."""
        self.groups_running = self.groups_ready = self.workers = 0
        self.publish_seconds = 0.0
        self.probe_distance: float | None = None
        """Probe distance between the newest version and the one before, once this process has published two."""
        self.learning: Learning | None = None
        """Whether anything was learned, once that is known."""
        self.tools = ToolHealth(offered=offers_tools, window=episodes_per_step)
        self.tool_warning: ToolWarning | None = None
        """What is wrong with the calls of the last episodes; None while calls work."""
        self.sandboxes: dict[str, SandboxInUse] = {}
        """Sandboxes of tools that run code, by tool."""
        self.gathering = Gathering()
        """Rollouts that came in since the last step."""
        self._gathering_began = time.monotonic()
        self._recent: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS * episodes_per_step)
        self._zero_advantage: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False
        """Whether the progress streams end: there will be no further change."""

    @property
    def final(self) -> bool:
        """Whether the run has ended and its end is published."""
        return self.phase.final

    def end(self) -> None:
        """Ends the progress streams once they have sent the last state."""
        self.ended = True
        self.update()

    def update(self, **facts: Any) -> None:
        """Sets attributes and wakes the watchers."""
        for name, value in facts.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Sets the running loop as the target of `update_soon`."""
        self._loop = asyncio.get_running_loop()

    def update_soon(self, **facts: Any) -> None:
        """`update` from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, there are no watchers
            self._loop.call_soon_threadsafe(partial(self.update, **facts))

    def count_failure(self, failure: Failure) -> None:
        self.failures[f"{failure.boundary}/{failure.code}"] += 1
        self.update()

    def count_failure_soon(self, failure: Failure) -> None:
        """`count_failure` from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, there are no watchers
            self._loop.call_soon_threadsafe(self.count_failure, failure)

    def count_stale(self, *, age: int, seconds: float, tokens: int) -> None:
        """Counts a group that became too old to be trained on."""
        for count in (self.stale, self.stale_in_step):
            count.add(age=age, seconds=seconds, tokens=tokens)

    def report_sandboxes(self, sandboxes: Mapping[str, SandboxInUse]) -> None:
        """Records the sandboxes that a worker reports; one that has not listed its tools yet reports none."""
        changed = {name: used for name, used in sandboxes.items() if used != self.sandboxes.get(name)}
        if changed:
            for name, used in changed.items():
                log.info("tool %s runs code in %s", name, used)
            self.update(sandboxes={**self.sandboxes, **changed})

    def skip(self, data_set: str, ordinal: int) -> None:
        """Counts a row that cannot be run because its prompt leaves no room in the context."""
        self.skipped.add((data_set, ordinal))
        self.update()

    def add(self, group: Group) -> None:
        """Adds the scored episodes of a group to the running means."""
        scored = [episode for episode in group.episodes if episode.reward is not None]
        self._check_tools(group)
        self._recent.extend(map(episode_facts, scored))
        self.gathering.add_group()
        for episode in scored:
            self.gathering.add_episode(episode_facts(episode), tokens=episode.sampled_tokens)
        self._gathered()

    def _check_tools(self, group: Group) -> None:
        self.tools.add(group)
        warning, before = self.tools.warning(), self.tool_warning
        if warning is not None and (before is None or before.reason is not warning.reason):
            log.warning("tools: %s", warning.message)
        self.tool_warning = warning

    def begin_gathering(self, wanted: int) -> None:
        """Starts to count the rollouts of the next step, of so many groups."""
        self.gathering, self._gathering_began = Gathering(wanted=wanted), time.monotonic()

    def count_rollout_failure(self, failure: Failure) -> None:
        """Counts the failure of an episode or group for training."""
        self.gathering.failures[failure.boundary] += 1
        self.count_failure(failure)
        self._gathered()

    def _gathered(self) -> None:
        self.gathering.seconds = time.monotonic() - self._gathering_began
        log.debug("step %d: %s", self.step + 1, self.gathering.line())
        self.update()

    def finish_step(self, *, zero_advantage: bool) -> None:
        """Records a finished step and whether none of its groups had an advantage."""
        self._zero_advantage.append(zero_advantage)

    @property
    def degenerate(self) -> bool:
        """Whether all groups of the last steps had zero advantage."""
        return len(self._zero_advantage) == WINDOW_STEPS and all(self._zero_advantage)

    def recent(self) -> list[dict[str, float]]:
        """Numbers of the last episodes. Callable from any thread."""
        return list(self._recent)

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._changed.wait()

    def to_proto(self) -> pb.WatchProgressResponse:
        return pb.WatchProgressResponse(
            phase=run_phase_to_proto(self.phase),
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
            learning_warning="" if self.learning is None else self.learning.warning,
            gathering=gathering_to_proto(self.gathering),
            tool_warning_reason="" if self.tool_warning is None else self.tool_warning.reason,
            tool_warning="" if self.tool_warning is None else self.tool_warning.message,
            sandboxes=sandboxes_to_proto(self.sandboxes),
        )


def _engine_to_proto(engine: EngineReport) -> pb.EngineProgress:
    return pb.EngineProgress(
        name=engine.name,
        policy=policy_to_proto(engine.policy),
        lag=engine.lag,
        state=serving_state_to_proto(engine.state),
        message=engine.message,
    )
