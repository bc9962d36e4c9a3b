"""Records of a run: those of its steps, the summary, and the digest of its identity. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.runstate.history import History
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase
from kestrl.storage.summary import Means, RunSummary, SummaryPolicy, SummaryReason, ToolCalls
from kestrl_learner.progress.progress import episode_facts, means_of
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
SCHEDULE = {"algorithm": {"stale_groups"}}
"""Settings of the schedule among those."""
DEFAULT_LOOP = "tool_agent"
"""`spec.agent.loop` of a manifest that names none, which rows of edition 2 of the example mails named."""
EXAMPLE_DATABASE = re.compile(r"(/email-(?:train|validation)-\d+-\d+-v)3(\.db)")
"""File of the example mails of edition 3, as rows name it."""


def identity_digest(settings: LearnerSettings, scenarios: Iterable[Scenario]) -> str:
    """Digest of what must not change during a run: the `IDENTITY` settings and all training scenarios."""
    return _digest(settings, map(_row, scenarios))


def identity_digest_of_edition_2(settings: LearnerSettings, scenarios: Iterable[Scenario]) -> str:
    """This digest as versions with edition 2 of the example mails wrote it."""
    return _digest(settings, map(_row_of_edition_2, scenarios))


def _digest(settings: LearnerSettings, rows: Iterable[str]) -> str:
    # Defaults are excluded, so that a setting added by a later version does not change the digest.
    identity = settings.model_dump_json(include=set(IDENTITY), exclude=SCHEDULE, exclude_defaults=True)
    hashed = hashlib.sha256(identity.encode())
    for row in rows:
        hashed.update(row.encode())
    return hashed.hexdigest()


def _row(scenario: Scenario) -> str:
    return json.dumps(asdict(scenario), sort_keys=True, default=str)


def _row_of_edition_2(scenario: Scenario) -> str:
    """A row of `demo://email` as edition 2 had it: with the name of the default loop, and with that edition in the name
    of its database. Mails, questions and all else are the same.
    """
    return EXAMPLE_DATABASE.sub(r"\g<1>2\g<2>", _row(replace(scenario, agent=scenario.agent or DEFAULT_LOOP)))


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


def summary_of(
    state: RunState,
    *,
    status: RunPhase,
    reason: str,
    seconds: float,
    gap_bound: float,
    sampling: EvaluationSampling | None,
) -> RunSummary:
    """The summary of a run.

    Args:
        state: Its state at the end.
        status: The final phase.
        reason: Why it did not succeed.
        seconds: Time spent on the run by all its processes.
        gap_bound: Bound on the mean log-prob mismatch of a step, in nats.
        sampling: How the evaluations sampled; None without validation data.
    """
    history, tools, learning = state.history, state.tools, state.learning
    gap = {} if history.gap is None else history.gap.model_dump()
    return RunSummary(
        status=status,
        reason=reason,
        steps=state.steps.done,
        total_steps=state.steps.total,
        before=history.before,
        after=history.after,
        evaluations=evaluations_of(history),
        policy=None if state.verified.version is None else summary_policy(state.verified.version, state.verified.uri),
        learned=learning.learned,
        not_learned=SummaryReason(reason=learning.reason, message=learning.message)
        if learning.learned is False
        else None,
        learning_warning=learning.warning,
        seconds=seconds,
        logprob_gap={**gap, "worst": gap.get("max", 0.0), "bound": gap_bound},
        failures=history.failures,
        skipped_rows=history.skipped_rows,
        stale=history.stale.facts(),
        tools=ToolCalls.model_validate(history.tools.facts()),
        tool_warning=SummaryReason(reason=tools.warning_reason, message=tools.warning)
        if tools.warning_reason
        else None,
        sandboxes=tools.sandboxes,
        sampling=sampling,
        state=state.stored,
    )


def summary_policy(policy: PolicyVersion, uri: str) -> SummaryPolicy:
    """A version as in a summary."""
    return SummaryPolicy(version=policy.name, sha256=policy.sha256, uri=uri)


def evaluations_of(history: History) -> tuple[Means, ...]:
    """The evaluations of a run as in a summary."""
    return tuple({"step": step, **means} for step, means in history.evaluations.items())
