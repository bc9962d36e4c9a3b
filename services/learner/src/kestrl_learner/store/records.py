"""Records of a run: those of its steps, the summary, and the digest of its identity. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.runstate.states import RunPhase
from kestrl.storage.summary import Means, RunSummary, SummaryPolicy, SummaryReason, ToolCalls
from kestrl.tools import SandboxInUse
from kestrl_learner.progress.learning import Learning
from kestrl_learner.progress.progress import episode_facts, means_of
from kestrl_learner.progress.stale import Stale
from kestrl_learner.progress.tool_health import ToolCounts, ToolWarning
from kestrl_learner.store.run_record import RunRecord
from kestrl_learner.train.trainer import StepResult

IDENTITY = (
    "model",
    "dtype",
    "rank",
    "alpha",
    "targets",
    "adapter_from",
    "seed",
    "temperature",
    "evaluation",
    "algorithm",
    "max_tokens",
    "max_turns",
)
"""Settings that identify a run. The schedule is not among them: a longer one continues a run."""


def identity_digest(settings: LearnerSettings, scenarios: Sequence[Scenario]) -> str:
    """Digest of what must not change during a run: the `IDENTITY` settings and all training scenarios."""
    # Defaults are excluded, so that a setting added by a later version does not change the digest.
    hashed = hashlib.sha256(settings.model_dump_json(include=set(IDENTITY), exclude_defaults=True).encode())
    for scenario in scenarios:
        hashed.update(json.dumps(asdict(scenario), sort_keys=True, default=str).encode())
    return hashed.hexdigest()


def step_record(step: int, groups: Sequence[Group], result: StepResult) -> dict[str, Any]:
    """The record of a step in `metrics/`."""
    scored = [episode for group in groups for episode in group.episodes if episode.reward is not None]
    return {
        **means_of(map(episode_facts, scored)),
        "step": step,
        "episodes": len(scored),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "gap": result.mismatch.facts(),
        "idle_groups": result.zero_advantage_groups,
        "sampled_tokens": result.sampled,
        "diagnostics": dict(result.diagnostics),
    }


def format_means(means: Mapping[str, float]) -> str:
    """The main means as text."""
    return ", ".join(f"{name} {means[name]:.3f}" for name in ("reward", "answer_correct") if name in means)


def build_summary(
    record: RunRecord,
    *,
    status: RunPhase,
    reason: str,
    steps: int,
    total_steps: int,
    newest: tuple[PolicyVersion, str] | None,
    seconds: float,
    failures: Mapping[str, int],
    skipped: int,
    gap_bound: float,
    learning: Learning | None,
    stale: Stale,
    tools: ToolCounts,
    tool_warning: ToolWarning | None,
    sandboxes: Mapping[str, SandboxInUse],
    evaluation: EvaluationSampling | None,
) -> RunSummary:
    """The summary of a run.

    Args:
        record: What is kept over resumes.
        status: The final phase.
        reason: Why it did not succeed.
        steps: Optimiser steps done.
        total_steps: Optimiser steps of the schedule; more than `steps` if scenarios were dropped.
        newest: The newest version and its address.
        seconds: Time spent on the run by all its processes.
        failures: Counts by `boundary/code`.
        skipped: Rows whose prompts leave no room in the context.
        gap_bound: Bound on the mean log-prob mismatch of a step, in nats.
        learning: Whether anything was learned; None without training.
        stale: Groups released as too old.
        tools: Tool calls of the training episodes that were offered tools.
        tool_warning: What is wrong with the calls of the last episodes.
        sandboxes: Sandboxes of tools that run code, by tool.
        evaluation: How the evaluations sampled; None without validation data.
    """
    gap = {} if record.gap is None else asdict(record.gap)
    return RunSummary(
        status=status,
        reason=reason,
        steps=steps,
        total_steps=total_steps,
        before=record.before,
        after=record.after,
        evaluations=evaluations_of(record),
        policy=None if newest is None else summary_policy(*newest),
        learned=None if learning is None else learning.learned,
        not_learned=None
        if learning is None or learning.learned
        else SummaryReason(reason=learning.reason, message=learning.message),
        learning_warning="" if learning is None else learning.warning,
        seconds=seconds,
        logprob_gap={**gap, "worst": gap.get("max", 0.0), "bound": gap_bound},
        failures=dict(failures),
        skipped_rows=skipped,
        stale=stale.facts(),
        tools=ToolCalls.model_validate(tools.facts()),
        tool_warning=None
        if tool_warning is None
        else SummaryReason(reason=tool_warning.reason, message=tool_warning.message),
        sandboxes=dict(sandboxes),
        sampling=evaluation,
    )


def summary_policy(policy: PolicyVersion, uri: str) -> SummaryPolicy:
    """A version as in a summary."""
    return SummaryPolicy(version=policy.name, sha256=policy.sha256, uri=uri)


def evaluations_of(record: RunRecord) -> tuple[Means, ...]:
    """The evaluations of a run as in a summary."""
    return tuple({"step": step, **means} for step, means in record.evaluations.items())
