"""Has the rows of a job played and scored, in child processes as in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kestrl._app.local.secrets import Secrets
from kestrl._app.local.site import interpreter_of, planned_settings
from kestrl._app.plays.reports import read_report
from kestrl._app.plays.validation import validate_taskset
from kestrl._app.plays.verdict import PlaysVerdict, verdict
from kestrl._shared.checking import PlayedCheck, PlaysCheck, Report, RunsCheck, ask
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.settings.common import DataSettings, SettingsModel
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.job import JobSpec
from kestrl.data import locate_data
from kestrl.errors import SeveralProblems, UserInputError

START_SECONDS = 120.0
PLAYS = 8
"""Plays of a row, each of which has several calls."""
UNPAID = (
    "no form of the answers that stand in the tasks earns more than doing nothing: the reward may never pay, or wants "
    "a form of its own"
)


def plays_of(job: AgentRLJob, *, base: Path, cache_dir: Path, rows: int, reports: Sequence[Path] = ()) -> PlaysVerdict:
    """What plays of the first training rows say, and the reports of other checks.

    Args:
        job: The job.
        base: Folder of the manifest.
        cache_dir: Folder for generated data.
        rows: Rows that are played.
        reports: Reports of vf-validate, which is not run then, and of `openenv validate`.

    Raises:
        UserInputError: Data, tools, environment, rewards or a report cannot be loaded.
    """
    spec = job.spec
    read_reports = [read_report(path) for path in reports]
    train, environment = spec.data.train, spec.environment
    path = locate_data(
        train.uri, size=train.size, base=base, seed=spec.data.seed, cache_dir=cache_dir, field="spec.data.train.uri"
    )
    data = DataSettings(path=str(path), size=train.size, promptless=environment is not None)
    settings = planned_settings(job, base, model="", template=None, environment_python=interpreter_of(environment))
    rollout = settings[Role.ROLLOUT]
    assert isinstance(rollout, RolloutSettings)
    if rollout.environment is None:
        played, findings = _plays(job, base, settings[Role.TOOLS], data, rows), PlaysVerdict()
    else:
        played, findings = _runs(spec, rollout, data, rows)
        if not reports:
            findings.add(validate_taskset(rollout.environment, folder=base.resolve(), tasks=rows))
    judge = settings[Role.JUDGE]
    assert isinstance(judge, JudgeSettings)
    check = PlayedCheck(judge=judge, data=data, max_turns=spec.agent.max_turns, rows=tuple(played))
    seconds = START_SECONDS + rows * PLAYS * sum(reward.timeout for reward in spec.rewards)
    scores = _facts(ask("kestrl_judge.plays", check, subject="spec.rewards", seconds=seconds))
    plays_verdict = verdict(played, scores["rows"]) if scores["rules"] else PlaysVerdict()
    if scores["left_out"]:
        names = ", ".join(scores["left_out"])
        plays_verdict.warnings.append(f"spec.rewards: {names} ask a judge model and were left out")
    for other in (findings, *read_reports):
        plays_verdict.add(other)
    return plays_verdict


def _plays(
    job: AgentRLJob, base: Path, tools: SettingsModel | None, data: DataSettings, rows: int
) -> Sequence[dict[str, Any]]:
    """The rows as they were played with the job's tools, or in its environment."""
    spec = job.spec
    assert isinstance(tools, ToolsSettings)
    seconds = START_SECONDS + (0.0 if spec.environment is None else spec.environment.start_timeout)
    seconds += rows * PLAYS * spec.rollout.deadlines.tool
    played: Sequence[dict[str, Any]] = _facts(
        ask(
            "kestrl_tools.check.plays",
            PlaysCheck(tools=tools, data=data, rows=rows),
            subject="spec.tools" if spec.environment is None else "spec.environment",
            seconds=seconds,
            variables=Secrets(job, base).tools(),
        )
    )["rows"]
    return played


def _runs(
    spec: JobSpec, rollout: RolloutSettings, data: DataSettings, rows: int
) -> tuple[Sequence[dict[str, Any]], PlaysVerdict]:
    """The rows as an environment that runs its episodes itself has played them, and what was noticed."""
    assert rollout.environment is not None
    deadline = spec.rollout.deadlines.episode
    check = RunsCheck(
        environment=rollout.environment, python_path=rollout.python_path, data=data, rows=rows, seconds=deadline
    )
    seconds = START_SECONDS + rollout.environment.start_seconds + rows * PLAYS * deadline
    facts = _facts(ask("kestrl_rollout.plays", check, subject="spec.environment", seconds=seconds))
    warnings = [UNPAID] if facts["unpaid"] else []
    return facts["rows"], PlaysVerdict(warnings=warnings)


def _facts(report: Report) -> dict[str, Any]:
    if report.problems:
        raise SeveralProblems(report.problems)
    if report.missing:
        raise UserInputError(f"{report.missing} is not installed, which plays episodes; install it")
    return dict(report.facts)
