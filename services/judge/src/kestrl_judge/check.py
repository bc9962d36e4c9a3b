"""`python -m kestrl_judge.check`: checks that the job's rewards can be loaded, and calls those of the user once, with a
made attempt at the first row.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kestrl._shared.checking import RewardsCheck, run_check
from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl.data.rows import DataRow, read_rows
from kestrl.errors import JudgeFailure, SeveralProblems, UserCodeError, UserInputError
from kestrl.rewards import Attempt, VerdictNeeded
from kestrl.rewards.checking import LEFT_OUT, NOT_FINITE, UnusableMetric
from kestrl.rewards.resolving import Reward, is_built_in, resolve
from kestrl.testing.attempts import make_attempt
from kestrl_judge.rules import rule_scorers
from kestrl_judge.worker import Rule

ANSWER = "A made answer of `kestrl validate`."


class RewardTrial(NamedTuple):
    """What one call of a reward has shown; both are empty if it returned a score."""

    problem: str = ""
    warning: str = ""


def check(settings: RewardsCheck) -> dict[str, Any]:
    """Loads every reward and tries those of the user; returns warnings.

    Raises:
        UserInputError: Rewards cannot be loaded or return no number (one line each), or one is listed twice.
    """
    sys.path[:0] = settings.judge.python_path
    rule_scorers(settings.judge)
    row, problems, warnings = _first_row(settings), list[str](), list[str]()
    with asyncio.Runner() as runner:
        for entry in settings.judge.rewards:
            try:
                function = resolve(entry.rule, field=entry.field, config=entry.config)
            except UserInputError as error:
                problems.append(str(error))
                continue
            if not is_built_in(entry.rule):
                trial = _tried(entry, function, row, settings.max_turns, runner)
                problems += filter(None, [trial.problem])
                warnings += filter(None, [trial.warning])
    if problems:
        raise SeveralProblems(problems)
    return {"warnings": warnings}


def _first_row(settings: RewardsCheck) -> DataRow | None:
    for file in settings.data.values():
        for row in islice(read_rows(Path(file.path), size=file.size, promptless=file.promptless), 1):
            return row
    return None


def _tried(
    entry: RewardEntry, function: Reward, row: DataRow | None, max_turns: int, runner: asyncio.Runner
) -> RewardTrial:
    """One call with a made attempt. What it returns is its signature; what it raises may be due to the attempt, which
    called no tool.
    """
    attempt = replace(made_attempt(row, max_turns), verdicts={} if entry.asks_judge else None)
    unusable: list[UnusableMetric] = []
    rule = Rule(entry.rule, function, built_in=False, runner=runner, report=unusable.append)
    where = "" if row is None else f" at {row.place}"
    try:
        rule.score(attempt)
    except VerdictNeeded:
        return RewardTrial()
    except JudgeFailure as error:
        problem = f"{entry.field}: {error}"
        return (
            RewardTrial(warning=f"{problem} (for a made attempt{where})")
            if error.code == NOT_FINITE
            else RewardTrial(problem)
        )
    except UserCodeError as error:
        return RewardTrial(
            warning=f"{entry.field}: {error} (for a made attempt{where} that calls no tool); an episode for which it "
            "raises has no reward"
        )
    for metric in unusable:
        problem = f"{entry.field}: {entry.rule}: {metric.text}; in a run it is left out, and counted in {LEFT_OUT}"
        return (
            RewardTrial(warning=f"{problem} (for a made attempt{where})") if metric.by_value else RewardTrial(problem)
        )
    return RewardTrial()


def made_attempt(row: DataRow | None, max_turns: int) -> Attempt:
    """An attempt at a row that answers at once."""
    attempt = make_attempt(ANSWER, max_turns=max_turns)
    if row is None:
        return attempt
    messages = [*map(dict, row.scenario.messages), {"role": "assistant", "content": ANSWER}]
    episode = replace(attempt.episode, scenario_id=row.scenario.id, messages=messages)
    return replace(attempt, scenario=row.scenario, episode=episode)


if __name__ == "__main__":
    run_check(RewardsCheck, check)
