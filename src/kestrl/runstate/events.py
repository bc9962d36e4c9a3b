"""The events that change the state of a run. Pure.

An event says what has happened, and what the state is after it. `kestrl.runstate.log` has the closed list of them, and
the reducer. Gauges are no events: they hold for a moment and are not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Literal

from kestrl.episode import PolicyVersion
from kestrl.errors import Failure
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.history import History, LastStep, LearningCounts, Means, Mismatch, Stale, StepCounts, ToolCounts
from kestrl.runstate.part import Part
from kestrl.runstate.state import (
    BUILDS,
    Activity,
    EngineFleet,
    EngineReport,
    Gauges,
    Learning,
    NewestPolicy,
    RunState,
    Steps,
    VerifiedPolicy,
)
from kestrl.runstate.states import RunPhase
from kestrl.runstate.work import EngineWork
from kestrl.tools import SandboxInUse


class RunEvent(Part, ABC):
    """Something that happened in a run."""

    @abstractmethod
    def after(self, state: RunState) -> RunState:
        """The state after this event, but for its number. Only the reducer calls it."""


class ProcessStarted(RunEvent):
    """A learner process begins, or continues, the run."""

    kind: Literal["process_started"] = "process_started"
    engines: int

    def after(self, state: RunState) -> RunState:
        return RunState(number=state.number, engines=EngineFleet(total=self.engines))


class StepsPlanned(RunEvent):
    """The data are read, and with them the number of steps is known."""

    kind: Literal["steps_planned"] = "steps_planned"
    total: int

    def after(self, state: RunState) -> RunState:
        return state.but(steps=state.steps.but(total=self.total))


class CheckpointFound(RunEvent):
    """Earlier processes have got to a step."""

    kind: Literal["checkpoint_found"] = "checkpoint_found"
    step: int

    def after(self, state: RunState) -> RunState:
        return state.but(steps=state.steps.but(done=self.step), storage=state.storage.but(checkpoint=self.step))


class HistoryRestored(RunEvent):
    """The run goes on from a step, and from the counts of its earlier processes."""

    kind: Literal["history_restored"] = "history_restored"
    step: int
    history: History

    def after(self, state: RunState) -> RunState:
        # Storage or a metric sink may have failed before the checkpoint was read.
        failures = Counter(self.history.failures) + Counter(state.history.failures)
        return state.but(steps=state.steps.but(done=self.step), history=self.history.but(failures=dict(failures)))


class PhaseEntered(RunEvent):
    """The run does something else now, or has ended."""

    kind: Literal["phase_entered"] = "phase_entered"
    phase: RunPhase
    message: str | None = None
    """None if the last message still holds."""
    failure: Failure | None = None
    """Why the run failed."""

    def after(self, state: RunState) -> RunState:
        message = state.activity.message if self.message is None else self.message
        return state.but(activity=Activity(phase=self.phase, message=message, failure=self.failure))


class ActivityNoted(RunEvent):
    """What the run does, for people."""

    kind: Literal["activity_noted"] = "activity_noted"
    message: str

    def after(self, state: RunState) -> RunState:
        return state.but(activity=state.activity.but(message=self.message))


class VersionPublished(RunEvent):
    """A version of the policy is stored, and engines are to verify it."""

    kind: Literal["version_published"] = "version_published"
    version: PolicyVersion
    uri: str
    parent: str
    probe_distance: float | None = None

    def after(self, state: RunState) -> RunState:
        policy = NewestPolicy(
            version=self.version,
            uri=self.uri,
            parent=self.parent,
            seconds=state.policy.seconds,
            probe_distance=self.probe_distance,
        )
        if self.version.step > 0:
            return state.but(policy=policy)
        return state.but(policy=policy, history=state.history.but(learning=LearningCounts(first=self.version.sha256)))


class VersionVerified(RunEvent):
    """Engines have verified the newest version."""

    kind: Literal["version_verified"] = "version_verified"
    seconds: float
    """From the upload."""

    def after(self, state: RunState) -> RunState:
        return state.but(
            policy=state.policy.but(seconds=self.seconds),
            verified=VerifiedPolicy(version=state.policy.version, uri=state.policy.uri),
        )


class EnginesObserved(RunEvent):
    """The state of an engine has changed."""

    kind: Literal["engines_observed"] = "engines_observed"
    verified: int
    reports: tuple[EngineReport, ...]
    total: int | None = None
    """Engines of the job; None in events of earlier versions, whose number could not change."""

    def after(self, state: RunState) -> RunState:
        total = state.engines.total if self.total is None else self.total
        all_builds = (*state.engines.builds, *(report.build for report in self.reports if report.build is not None))
        builds = tuple(dict.fromkeys(all_builds))[:BUILDS]
        fleet = state.engines.but(total=total, verified=self.verified, reports=self.reports, builds=builds)
        return state.but(engines=fleet)


class EnginesWorked(RunEvent):
    """What the engines did since the last event of this kind."""

    kind: Literal["engines_worked"] = "engines_worked"
    work: dict[str, EngineWork]
    """By the engine's name."""

    def after(self, state: RunState) -> RunState:
        return state.but(history=state.history.with_work(self.work))


class GatheringBegan(RunEvent):
    """The rollouts of the next step are counted from here."""

    kind: Literal["gathering_began"] = "gathering_began"
    wanted: int
    """Groups of the step."""

    def after(self, state: RunState) -> RunState:
        return state.but(gathering=Gathering(wanted=self.wanted), stale_in_step=Stale())


class GroupScored(RunEvent):
    """A group for training came in."""

    kind: Literal["group_scored"] = "group_scored"
    episodes: tuple[dict[str, float], ...]
    """The metrics of each scored episode."""
    tokens: int
    """Their sampled tokens."""
    seconds: float
    """Since the step's gathering began."""
    means: dict[str, float]
    """Means over the last episodes, these included."""
    tools: ToolCounts = ToolCounts()
    """Tool calls of these episodes."""

    def after(self, state: RunState) -> RunState:
        return state.but(
            means=self.means,
            gathering=state.gathering.with_group(self.episodes, tokens=self.tokens, seconds=self.seconds),
            history=state.history.but(tools=state.history.tools.plus(self.tools)),
        )


class FailureCounted(RunEvent):
    """An episode, a group, a metric sink or an engine failed."""

    kind: Literal["failure_counted"] = "failure_counted"
    boundary: str
    code: str
    gathered_seconds: float | None = None
    """Since the step's gathering began, for a failed episode or group of training; None for other failures."""

    def after(self, state: RunState) -> RunState:
        name = f"{self.boundary}/{self.code}"
        failures = {**state.history.failures, name: state.history.failures.get(name, 0) + 1}
        counted = state.but(history=state.history.but(failures=failures))
        if self.gathered_seconds is None:
            return counted
        return counted.but(gathering=state.gathering.with_failure(self.boundary, seconds=self.gathered_seconds))


class RowSkipped(RunEvent):
    """A row cannot be run: its prompt leaves no room in the context. Each row is reported once."""

    kind: Literal["row_skipped"] = "row_skipped"
    data_set: str
    ordinal: int

    def after(self, state: RunState) -> RunState:
        return state.but(history=state.history.but(skipped_rows=state.history.skipped_rows + 1))


class GroupOutdated(RunEvent):
    """A group became too old to be trained on and was released."""

    kind: Literal["group_outdated"] = "group_outdated"
    age: int
    """In steps."""
    seconds: float
    """It ran so long."""
    tokens: int

    def after(self, state: RunState) -> RunState:
        return state.with_stale(Stale(by_age={self.age: 1}, seconds=self.seconds, tokens=self.tokens))


class TokensMasked(RunEvent):
    """A step took groups with tokens that are too old to be trained on."""

    kind: Literal["tokens_masked"] = "tokens_masked"
    tokens: int

    def after(self, state: RunState) -> RunState:
        return state.with_stale(Stale(masked=self.tokens))


class ToolsWarned(RunEvent):
    """The tool calls of the last episodes do not work, or work again."""

    kind: Literal["tools_warned"] = "tools_warned"
    reason: str
    """Empty when they work again."""
    message: str

    def after(self, state: RunState) -> RunState:
        return state.but(tools=state.tools.but(warning_reason=self.reason, warning=self.message))


class ToolsAwaited(RunEvent):
    """A credential of a tool or judge is accepted no more and another one is waited for, or one is accepted again."""

    kind: Literal["tools_awaited"] = "tools_awaited"
    reason: str
    """Empty when one is accepted again."""

    def after(self, state: RunState) -> RunState:
        return state.but(tools=state.tools.but(wait=self.reason))


class SandboxesReported(RunEvent):
    """A tool that runs code has a sandbox, or another one than before."""

    kind: Literal["sandboxes_reported"] = "sandboxes_reported"
    sandboxes: dict[str, SandboxInUse]

    def after(self, state: RunState) -> RunState:
        return state.but(tools=state.tools.but(sandboxes={**state.tools.sandboxes, **self.sandboxes}))


class MismatchMeasured(RunEvent):
    """The learner has recomputed the log-probs of a step's tokens."""

    kind: Literal["mismatch_measured"] = "mismatch_measured"
    gap: Mismatch

    def after(self, state: RunState) -> RunState:
        before = state.history.gap
        return state.but(history=state.history.but(gap=self.gap if before is None else before.merged(self.gap)))


class StepFinished(RunEvent):
    """The ledger holds one more step."""

    kind: Literal["step_finished"] = "step_finished"
    step: int
    counts: StepCounts
    took: LastStep
    message: str

    def after(self, state: RunState) -> RunState:
        equal = self.counts.idle_groups == self.counts.groups
        return state.but(
            activity=state.activity.but(message=self.message),
            steps=Steps(
                done=self.step, total=state.steps.total, equal_rewards=state.steps.equal_rewards + 1 if equal else 0
            ),
            last_step=self.took,
            history=state.history.with_step(self.counts, self.took),
        )


class LearningObserved(RunEvent):
    """Whether the weights change is known."""

    kind: Literal["learning_observed"] = "learning_observed"
    learning: Learning

    def after(self, state: RunState) -> RunState:
        return state.but(learning=self.learning)


class Evaluated(RunEvent):
    """The held-out data were run."""

    kind: Literal["evaluated"] = "evaluated"
    step: int
    means: Means

    def after(self, state: RunState) -> RunState:
        return state.but(history=state.history.but(evaluations={**state.history.evaluations, self.step: self.means}))


class Compared(RunEvent):
    """An evaluation is the one before training, or the one after it."""

    kind: Literal["compared"] = "compared"
    when: Literal["before", "after"]
    means: Means | None

    def after(self, state: RunState) -> RunState:
        return state.but(history=state.history.but(**{self.when: self.means}))


class CheckpointConfirmed(RunEvent):
    """A checkpoint was written and read back."""

    kind: Literal["checkpoint_confirmed"] = "checkpoint_confirmed"
    step: int

    def after(self, state: RunState) -> RunState:
        return state.but(storage=state.storage.but(checkpoint=self.step, failure=""))


class StorageRefused(RunEvent):
    """Storage refused something, or does not hold what was written."""

    kind: Literal["storage_refused"] = "storage_refused"
    reason: str

    def after(self, state: RunState) -> RunState:
        return state.but(storage=state.storage.but(failure=self.reason))


class StorageAwaited(RunEvent):
    """Storage cannot be used and is waited for, or can be used again."""

    kind: Literal["storage_awaited"] = "storage_awaited"
    reason: str
    """Empty when it can be used again."""

    def after(self, state: RunState) -> RunState:
        return state.but(storage=state.storage.but(wait=self.reason))


class ObservationsEnded(RunEvent):
    """The run has ended, and engines and workers are no longer observed."""

    kind: Literal["observations_ended"] = "observations_ended"

    def after(self, state: RunState) -> RunState:
        return state.but(
            engines=state.engines.but(reports=()), last_step=state.last_step.but(eta_seconds=0.0), gauges=Gauges()
        )
