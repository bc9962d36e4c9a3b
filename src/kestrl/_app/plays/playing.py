"""Has the rows of a job played and scored, in child processes as in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kestrl._app.local.secrets import Secrets
from kestrl._app.local.site import interpreter_of, planned_settings
from kestrl._app.plays.reports import read_report
from kestrl._app.plays.verdict import PlaysVerdict, verdict
from kestrl._shared.checking import PlayedCheck, PlaysCheck, Report, ask
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.spec import AgentRLJob
from kestrl.data import locate_data
from kestrl.errors import SeveralProblems, UserInputError

START_SECONDS = 120.0
PLAYS = 8
"""Plays of a row, each of which has several calls."""


def plays_of(job: AgentRLJob, *, base: Path, cache_dir: Path, rows: int, reports: Sequence[Path] = ()) -> PlaysVerdict:
    """What plays of the first training rows say, and the reports of other checks.

    Args:
        job: The job.
        base: Folder of the manifest.
        cache_dir: Folder for generated data.
        rows: Rows that are played.
        reports: Reports of vf-validate and of `openenv validate`.

    Raises:
        UserInputError: Data, tools, environment, rewards or a report cannot be loaded, or the environment runs its
            episodes itself and there is no report of it.
    """
    spec = job.spec
    reported = PlaysVerdict()
    for path in reports:
        reported.add(read_report(path))
    train, environment = spec.data.train, spec.environment
    if environment is not None and environment.owns_loop:
        if not reports:
            raise UserInputError(
                f"spec.environment.{environment.kind}: runs its episodes itself, and is not played without a model; "
                "check its task set with vf-validate, and name its folder with --report"
            )
        return reported
    path = locate_data(
        train.uri, size=train.size, base=base, seed=spec.data.seed, cache_dir=cache_dir, field="spec.data.train.uri"
    )
    data = DataSettings(path=str(path), size=train.size, promptless=environment is not None)
    settings = planned_settings(job, base, model="", template=None, environment_python=interpreter_of(environment))
    tools, judge = settings[Role.TOOLS], settings[Role.JUDGE]
    assert isinstance(tools, ToolsSettings)
    assert isinstance(judge, JudgeSettings)
    seconds = START_SECONDS + (0.0 if environment is None else environment.start_timeout)
    seconds += rows * PLAYS * spec.rollout.deadlines.tool
    played = _facts(
        ask(
            "kestrl_tools.check.plays",
            PlaysCheck(tools=tools, data=data, rows=rows),
            subject="spec.tools" if environment is None else "spec.environment",
            seconds=seconds,
            variables=Secrets(job, base).tools(),
        )
    )["rows"]
    check = PlayedCheck(judge=judge, data=data, max_turns=spec.agent.max_turns, rows=tuple(played))
    seconds = START_SECONDS + rows * PLAYS * sum(reward.timeout for reward in spec.rewards)
    scores = _facts(ask("kestrl_judge.plays", check, subject="spec.rewards", seconds=seconds))
    plays_verdict = verdict(played, scores["rows"]) if scores["rules"] else PlaysVerdict()
    if scores["left_out"]:
        names = ", ".join(scores["left_out"])
        plays_verdict.warnings.append(f"spec.rewards: {names} ask a judge model and were left out")
    plays_verdict.add(reported)
    return plays_verdict


def _facts(report: Report) -> dict[str, Any]:
    if report.problems:
        raise SeveralProblems(report.problems)
    if report.missing:
        raise UserInputError(f"{report.missing} is not installed, which plays episodes; install it")
    return dict(report.facts)
