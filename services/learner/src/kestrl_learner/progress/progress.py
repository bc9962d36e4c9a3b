"""The state of the run in the learner: the events of its parts, in the order in which they happened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kestrl.episode import CallOutcome, Episode, Group
from kestrl.errors import Boundary, Failure
from kestrl.runstate import events
from kestrl.runstate.log import Entry, Event, reduced
from kestrl.runstate.state import WINDOW_STEPS, Gauges, RunState
from kestrl.tools import SandboxInUse
from kestrl_learner.progress.engine_work import WorkCounts
from kestrl_learner.progress.idle_clock import IdleClock
from kestrl_learner.progress.tool_health import ToolHealth

log = logging.getLogger(__name__)
LONGEST_WAIT = 500
"""Characters of a message about what is waited for."""
SKIPPED = "ruler_skipped"
"""Metric of a score for which no judge model was asked."""
UNSTORED = 10_000
"""Events that wait to be stored; runs that do not store them keep no more."""


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
    """State of the run, whose watchers are woken by every event.

    Args:
        engines: Engines of the job.
        episodes_per_step: Episodes of a step.
        offers_tools: Whether the job offers tools.
    """

    def __init__(self, engines: int, episodes_per_step: int, *, offers_tools: bool = False) -> None:
        self.state = RunState()
        self.tools = ToolHealth(offered=offers_tools, window=episodes_per_step)
        self.idle = IdleClock()
        self.work = WorkCounts()
        self.skipped: set[tuple[str, int]] = set()
        """Rows whose prompts leave no room in the context, by data set and ordinal."""
        self.unstored: deque[Entry] = deque(maxlen=UNSTORED)
        """Events that are not stored yet, the newest of them if there are too many."""
        self._awaited: Boundary | None = None
        """The boundary of the credential that is waited for: tool, sandbox or judge; None while none is."""
        self._gathering_began = time.monotonic()
        self._recent: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS * episodes_per_step)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False
        """Whether the progress streams end: there will be no further change."""
        self.emit(events.ProcessStarted(engines=engines))

    @property
    def final(self) -> bool:
        """Whether the run has ended and its end is published."""
        return self.state.final

    def begin(self) -> None:
        """Sets the running loop as the target of `emit_soon`."""
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Records what has happened, unless it changes nothing."""
        if event.after(self.state) != self.state:
            entry = Entry(number=self.state.number + 1, at=time.time(), event=event)
            self.state = reduced(self.state, [entry])
            self.unstored.append(entry)
            self._wake()

    def continue_numbers(self, stored: int) -> None:
        """Numbers the events that are not stored yet after those of earlier processes.

        Args:
            stored: Number of the last stored event.
        """
        self.state = self.state.but(number=self.state.number + stored)
        shifted = [entry.but(number=entry.number + stored) for entry in self.unstored]
        self.unstored = deque(shifted, maxlen=UNSTORED)

    def take_unstored(self) -> tuple[Sequence[Entry], RunState]:
        """Events that are not stored yet, in their order, and the state after them."""
        entries = tuple(self.unstored)
        self.unstored.clear()
        return entries, self.state

    def emit_soon(self, event: Event) -> None:
        """`emit` from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, there are no watchers
            self._loop.call_soon_threadsafe(partial(self.emit, event))

    def observe(
        self, *, groups_running: int | None = None, groups_ready: int | None = None, workers: int | None = None
    ) -> None:
        """Sets numbers that hold for a moment."""
        old = self.state.gauges
        gauges = Gauges(
            groups_running=old.groups_running if groups_running is None else groups_running,
            groups_ready=old.groups_ready if groups_ready is None else groups_ready,
            workers=old.workers if workers is None else workers,
        )
        if gauges != old:
            self.state = self.state.but(gauges=gauges)
            self._wake()

    def record_work(self) -> None:
        """Records what the engines did since the last call."""
        if work := self.work.lap():
            self.emit(events.EnginesWorked(work=work))

    def end(self) -> None:
        """Ends the progress streams once they have sent the last state."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._changed.wait()

    def count_failure(self, failure: Failure) -> None:
        self.emit(events.FailureCounted(boundary=failure.boundary, code=failure.code))

    def count_failure_soon(self, failure: Failure) -> None:
        """`count_failure` from any thread."""
        self.emit_soon(events.FailureCounted(boundary=failure.boundary, code=failure.code))

    def count_rollout_failure(self, failure: Failure) -> None:
        """Counts the failure of an episode or group for training."""
        seconds = time.monotonic() - self._gathering_began
        self.emit(events.FailureCounted(boundary=failure.boundary, code=failure.code, gathered_seconds=seconds))
        self._log_gathering()

    def await_credential(self, failure: Failure) -> None:
        """Records that a credential is accepted no more; an earlier record stays, since it says since when."""
        if not self.state.tools.wait:
            self._awaited = failure.boundary
            log.warning("waiting for a credential: %s", failure.message)
            since = time.strftime("%H:%M:%SZ", time.gmtime())
            self.emit(events.ToolsAwaited(reason=f"{failure.message[:LONGEST_WAIT]}; since {since}"))

    def accept_credential(self, group: Group) -> bool:
        """Records that the awaited credential is accepted, if a group shows that it is; returns whether one was."""
        if self._awaited is None or not _accepted(self._awaited, group):
            return False
        log.info("the credential is accepted again")
        self._awaited = None
        self.emit(events.ToolsAwaited(reason=""))
        return True

    def report_sandboxes(self, sandboxes: Mapping[str, SandboxInUse]) -> None:
        """Records the sandboxes that a worker reports; one that has not listed its tools yet reports none."""
        known_sandboxes = self.state.tools.sandboxes
        changed = {name: sandbox for name, sandbox in sandboxes.items() if sandbox != known_sandboxes.get(name)}
        if changed:
            for name, sandbox in changed.items():
                log.info("tool %s runs code in %s", name, sandbox)
            self.emit(events.SandboxesReported(sandboxes=changed))

    def skip(self, data_set: str, ordinal: int) -> None:
        """Counts a row that cannot be run because its prompt leaves no room in the context; each row once."""
        if (data_set, ordinal) not in self.skipped:
            self.skipped.add((data_set, ordinal))
            self.emit(events.RowSkipped(data_set=data_set, ordinal=ordinal))

    def begin_gathering(self, group_count: int) -> None:
        """Starts to count the rollouts of the next step, of so many groups."""
        self._gathering_began = time.monotonic()
        self.emit(events.GatheringBegan(wanted=group_count))

    def add(self, group: Group) -> None:
        """Adds the scored episodes of a group to the running means."""
        scored = [episode for episode in group.episodes if episode.reward is not None]
        facts = tuple(map(episode_facts, scored))
        calls = self.tools.add(group)
        self._recent.extend(facts)
        self.emit(
            events.GroupScored(
                episodes=facts,
                tokens=sum(episode.sampled_tokens for episode in scored),
                seconds=time.monotonic() - self._gathering_began,
                means=means_of(self._recent),
                tools=calls,
            )
        )
        self._check_tools()
        self._log_gathering()

    def _check_tools(self) -> None:
        warning, before = self.tools.warning(), self.state.tools
        if warning is None and before.warning_reason:
            self.emit(events.ToolsWarned(reason="", message=""))
        elif warning is not None and (warning.reason, warning.message) != (before.warning_reason, before.warning):
            if warning.reason != before.warning_reason:
                log.warning("tools: %s", warning.message)
            self.emit(events.ToolsWarned(reason=warning.reason, message=warning.message))

    def _log_gathering(self) -> None:
        log.debug("step %d: %s", self.state.steps.done + 1, self.state.gathering.line())


def _accepted(boundary: Boundary, group: Group) -> bool:
    """Whether a group shows that a credential is accepted: by a call that a tool answered, or by a judge's score."""
    if boundary is Boundary.JUDGE:
        return any(episode.reward is not None and not episode.metrics.get(SKIPPED) for episode in group.episodes)
    return any(call.outcome is CallOutcome.OK for episode in group.episodes for call in episode.tool_calls)
