"""The state of a run: one frozen, versioned object that every reader gets.

`kestrl.runstate.events` has the events that change it. `summary.json`, `run.json`, the learner's stream, the live view,
`kestrl status` and the operator read it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BeforeValidator, Field

from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.history import History, LastStep, Stale
from kestrl.runstate.part import Part
from kestrl.runstate.states import RunPhase, ServingState
from kestrl.runstate.versioned import Versioned
from kestrl.tools import SandboxInUse

BUILDS = 16
"""Builds of engines that a run names."""
WINDOW_STEPS = 2
"""Steps that the running means and the check for zero-advantage steps cover."""


def _phase(value: object) -> object:
    return value if value in set(RunPhase) else None


def _serving(value: object) -> object:
    return value if value in set(ServingState) else None


def _version(value: Any) -> Any:
    """As on the wire, where a version without a digest is none."""
    if not isinstance(value, dict):
        return value
    content = cast("dict[str, Any]", value)
    return content if content.get("sha256") else None


def _failure(value: Any) -> Any:
    """A boundary that a later version has added is read as the widest one."""
    if not isinstance(value, dict):
        return value
    content = cast("dict[str, Any]", value)
    return content if content.get("boundary") in set(Boundary) else {**content, "boundary": Boundary.INFRASTRUCTURE}


Version = Annotated[PolicyVersion | None, BeforeValidator(_version)]


class Activity(Part):
    """What the run does now."""

    phase: Annotated[RunPhase | None, BeforeValidator(_phase)] = RunPhase.STARTING
    """None if it is unknown to this version."""
    message: str = ""
    """For people."""
    failure: Annotated[Failure | None, BeforeValidator(_failure)] = None
    """Why the run failed."""


class Steps(Part):
    """Optimiser steps."""

    done: int = 0
    total: int = 0
    equal_rewards: int = 0
    """Last steps in a row of which no group had an advantage."""

    @property
    def degenerate(self) -> bool:
        """Whether all groups of the last steps had zero advantage."""
        return self.equal_rewards >= WINDOW_STEPS


class NewestPolicy(Part):
    """The newest published version of the policy."""

    version: Version = None
    uri: str = ""
    parent: str = ""
    """Name of the version from which it was trained; empty for the first."""
    seconds: float = 0.0
    """From the upload until engines had verified it."""
    probe_distance: float | None = None
    """Probe distance to the version before, once this process has published two."""


class VerifiedPolicy(Part):
    """The newest version that an engine has verified: with it the run ends."""

    version: Version = None
    uri: str = ""


class EngineBuild(Part):
    """An engine's software, as it answered a verification."""

    engine: str = ""
    """Such as vllm."""
    version: str = ""
    """Such as 0.32.0; `unknown` if it does not say."""
    witness: str = ""
    """What names the policy of a completion: `engine` or `guard`."""


class EngineReport(Part):
    """Last observed state of one engine."""

    name: str
    policy: Version = None
    """The newest version it has verified."""
    lag: int = 0
    """Steps behind the newest published version."""
    state: Annotated[ServingState | None, BeforeValidator(_serving)] = None
    """None if it is unknown to this version."""
    message: str = ""
    """Why it does not serve the newest version; empty if that is not known."""
    build: EngineBuild | None = None
    """None before its first verification."""

    @property
    def up_to_date(self) -> bool:
        """Whether it serves the newest version, or the one before while it loads the newest."""
        serves = self.policy is not None and self.lag <= 1 and not self.message
        return serves and self.state in {ServingState.SERVING, ServingState.LOADING}


class EngineFleet(Part):
    """The engines of the job."""

    total: int = 0
    """Engines but those that drain."""
    verified: int = 0
    """Engines that have verified the newest version."""
    reports: tuple[EngineReport, ...] = ()
    """In the job's order; empty before the engines are contacted and after the end of the run."""
    builds: tuple[EngineBuild, ...] = ()
    """Builds that have verified a version in this run, the first `BUILDS` of them."""

    @property
    def updating(self) -> bool:
        """Whether every engine has verified the version before the newest and loads that one, if it has not verified it
        already: so it is for a while after each step.
        """
        staying = [report for report in self.reports if report.state is not ServingState.DRAINING]
        return self.verified < self.total <= len(staying) and all(report.up_to_date for report in staying)


class Learning(Part):
    """Whether the weights have changed since version 0."""

    learned: bool | None = None
    """None before it is known."""
    reason: str = ""
    """Why not, in one word; empty when something was learned."""
    message: str = ""
    """What was observed and what to check or change."""
    warning: str = ""
    """What is lost of what could have been learned, and what to change; empty otherwise."""


class ToolUse(Part):
    """How the tools of the job work."""

    warning_reason: str = ""
    """What is wrong with the calls of the last episodes, in one word; empty while calls work, and without tools."""
    warning: str = ""
    """The same for people, with what to check."""
    sandboxes: dict[str, SandboxInUse] = Field(default_factory=dict[str, SandboxInUse])
    """Sandboxes of tools that run code, by tool, as last reported."""
    wait: str = ""
    """The credential that is waited for, because a tool's server, a sandbox or a judge model accepts it no more, and
    since when; empty while credentials are accepted."""


class StoreAccess(Part):
    """The run's storage as the learner finds it."""

    checkpoint: int | None = None
    """Step of the newest checkpoint that was read back."""
    failure: str = ""
    """The last refusal, until a checkpoint succeeds."""
    wait: str = ""
    """Why storage is being waited for; empty if it is not."""


class Gauges(Part):
    """Numbers that hold for a moment: they are reported and not stored."""

    groups_running: int = 0
    groups_ready: int = 0
    """Groups waiting for a step."""
    workers: int = 0
    """Rollout workers that are reachable and accept groups."""


class RunState(Versioned):
    """The state of a run."""

    NAME: ClassVar[str] = "run state"
    number: int = 0
    """Number of the last event that made this state."""
    activity: Activity = Activity()
    steps: Steps = Steps()
    policy: NewestPolicy = NewestPolicy()
    verified: VerifiedPolicy = VerifiedPolicy()
    engines: EngineFleet = EngineFleet()
    means: dict[str, float] = Field(default_factory=dict[str, float])
    """Means over the last episodes."""
    gathering: Gathering = Gathering()
    """What has come in of the step's rollouts."""
    stale_in_step: Stale = Stale()
    """Groups that were released as too old since the last step."""
    last_step: LastStep = LastStep()
    learning: Learning = Learning()
    tools: ToolUse = ToolUse()
    storage: StoreAccess = StoreAccess()
    history: History = History()
    """What the run did over all its processes."""
    gauges: Gauges = Gauges()

    @property
    def final(self) -> bool:
        """Whether the run has ended and its end is reported."""
        return self.activity.phase is not None and self.activity.phase.final

    def with_stale(self, stale: Stale) -> Self:
        """The state with more that was given up or masked as too old."""
        return self.but(
            stale_in_step=self.stale_in_step.plus(stale), history=self.history.but(stale=self.history.stale.plus(stale))
        )

    @property
    def stored(self) -> Self:
        """The form in which it is stored: without gauges."""
        return self.model_copy(update={"gauges": Gauges()})
