"""Progress of a run, received from the learner's stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kestrl._app.local.runner_record import ProgressRecord
from kestrl._shared.rpc.codec import gathering_from_proto, run_phase_from_proto, sandboxes_from_proto
from kestrl.api.learner.v1 import learner_pb2
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import failure_from_proto, policy_from_proto
from kestrl.errors import Failure
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.states import RunPhase
from kestrl.tools import SandboxInUse

SHOWN_FIRST = ("reward", "answer_correct", "num_turns")
"""Means that every view shows if present, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A progress report of the learner."""

    phase: RunPhase = RunPhase.STARTING
    step: int = 0
    total_steps: int = 0
    means: Mapping[str, float] = field(default_factory=dict[str, float])
    policy: PolicyVersion | None = None
    engines_converged: int = 0
    engines_total: int = 0
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    failure: Failure | None = None
    message: str = ""
    groups_running: int = 0
    skipped_rows: int = 0
    """Rows whose prompts do not fit the context."""
    not_learned: str = ""
    """Why nothing was learned so far; empty otherwise, or when it is too early to determine."""
    learning_warning: str = ""
    """What is lost of what could be learned; empty otherwise."""
    tool_warning: str = ""
    """What is wrong with the tool calls of the last episodes; empty otherwise."""
    sandboxes: Mapping[str, SandboxInUse] = field(default_factory=dict[str, SandboxInUse])
    """Sandboxes of tools that run code, by tool."""
    gathering: Gathering = field(default_factory=Gathering)
    """What has come in of the step's rollouts."""
    storage_wait: str = ""
    """Message while the learner waits for unavailable storage; empty otherwise."""

    @staticmethod
    def from_proto(message: learner_pb2.WatchProgressResponse) -> Progress:
        return Progress(
            phase=run_phase_from_proto(message.phase) or RunPhase.STARTING,
            step=message.step,
            total_steps=message.total_steps,
            means=dict(message.means),
            policy=policy_from_proto(message.policy),
            engines_converged=message.engines_converged,
            engines_total=message.engines_total,
            tokens_per_second=message.tokens_per_second,
            eta_seconds=message.eta_seconds,
            failures=dict(message.failures),
            failure=failure_from_proto(message.failure) if message.HasField("failure") else None,
            message=message.message,
            groups_running=message.groups_running,
            skipped_rows=message.skipped_rows,
            not_learned=message.not_learned,
            learning_warning=message.learning_warning,
            storage_wait=message.storage_wait,
            tool_warning=message.tool_warning,
            sandboxes=sandboxes_from_proto(message.sandboxes),
            gathering=gathering_from_proto(message.gathering),
        )

    def record(self) -> ProgressRecord:
        """The form in `run.json`."""
        return ProgressRecord(
            phase=self.phase,
            step=self.step,
            total_steps=self.total_steps,
            means=dict(self.means),
            policy=self.policy.name if self.policy else None,
            engines_converged=self.engines_converged,
            engines_total=self.engines_total,
            tokens_per_second=self.tokens_per_second,
            eta_seconds=self.eta_seconds,
            failures=dict(self.failures),
            failure=str(self.failure) if self.failure else None,
            message=self.message,
            groups_running=self.groups_running,
            skipped_rows=self.skipped_rows,
            not_learned=self.not_learned,
            learning_warning=self.learning_warning,
            storage_wait=self.storage_wait,
            tool_warning=self.tool_warning,
            sandboxes=dict(self.sandboxes),
            gathering=self.gathering.facts(),
        )


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def means_line(means: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {means[name]:.3f}" for name in SHOWN_FIRST if name in means)


def one_line(progress: Progress) -> str:
    """A progress report as one plain line, for output that is not a terminal."""
    parts = [f"{progress.phase} step {progress.step}/{progress.total_steps}"]
    if progress.means:
        parts.append(means_line(progress.means))
    if progress.policy is not None:
        parts.append(f"policy v{progress.policy.step} proved {progress.engines_converged}/{progress.engines_total}")
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.eta_seconds:
        parts.append(f"{clock(progress.eta_seconds)} to go")
    if progress.failures:
        parts.append("failures " + ", ".join(f"{name} {count}" for name, count in sorted(progress.failures.items())))
    if progress.skipped_rows:
        parts.append(f"skipped rows {progress.skipped_rows}")
    if progress.message:
        parts.append(progress.message)
    return " | ".join(parts)
