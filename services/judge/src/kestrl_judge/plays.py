"""`python -m kestrl_judge.plays`: scores episodes that were played without a model, by the rules of a job."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrl._shared.checking import ANSWER_FORMS, SOLUTION, PlayedCheck, run_check
from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl.data.rows import DataRow, read_rows
from kestrl.errors import JudgeFailure, UserCodeError, text_of
from kestrl.rewards import Attempt, VerdictNeeded
from kestrl.rewards.resolving import is_built_in, resolve
from kestrl.testing.attempts import make_attempt
from kestrl_judge.worker import Rule

Weighted = tuple[float, Rule]


def check(settings: PlayedCheck) -> dict[str, Any]:
    """The reward of each play, or why it has none.

    Raises:
        UserInputError: A rule cannot be loaded.
    """
    sys.path[:0] = settings.judge.python_path
    rows = read_rows(Path(settings.data.path), size=settings.data.size, promptless=settings.data.promptless)
    with asyncio.Runner() as runner:
        rules = [(entry.weight, _rule(entry, runner)) for entry in settings.judge.rewards if not entry.asks_judge]
        scored = [_row(played, rows[int(played["ordinal"])], rules, settings.max_turns) for played in settings.rows]
    left_out = [entry.rule for entry in settings.judge.rewards if entry.asks_judge]
    left_out += [] if settings.judge.ruler is None else ["ruler"]
    return {"rows": scored, "left_out": left_out, "rules": len(rules)}


def _rule(entry: RewardEntry, runner: asyncio.Runner) -> Rule:
    function = resolve(entry.rule, field=entry.field, config=entry.config)
    return Rule(entry.rule, function, built_in=is_built_in(entry.rule), runner=runner, report=lambda _: None)


def _row(played: dict[str, Any], row: DataRow, rules: Sequence[Weighted], max_turns: int) -> dict[str, list[Any]]:
    """Rewards of the plays of a row by their kind. Where no environment played it, the ground truth is an answer."""
    plays: dict[str, list[dict[str, Any]]] = played["plays"]
    rewards = {name: [_reward(play, row, rules, max_turns) for play in several] for name, several in plays.items()}
    ground_truth = row.scenario.ground_truth
    if played["answers"] and isinstance(ground_truth, str | int | float) and not isinstance(ground_truth, bool):
        base = next((play for several in plays.values() for play in several if "failure" not in play), None)
        if base is not None:
            forms = [{**base, "turns": [form.format(ground_truth)]} for form in ANSWER_FORMS]
            rewards[SOLUTION] = _best([[_reward(play, row, rules, max_turns) for _ in range(2)] for play in forms])
    return rewards


def _best(pairs: Sequence[list[Any]]) -> list[Any]:
    """The form that earns most; the first, with its failure, where all fail."""
    numbers = [pair for pair in pairs if all(isinstance(number, float) for number in pair)]
    return max(numbers, key=min) if numbers else pairs[0]


def _reward(play: dict[str, Any], row: DataRow, rules: Sequence[Weighted], max_turns: int) -> float | str:
    """The reward of a play, or why it has none."""
    if "failure" in play:
        return str(play["failure"])
    attempt = make_attempt(*play["turns"], environments=play["environments"], max_turns=max_turns)
    messages = [*map(dict, row.scenario.messages), *attempt.episode.messages[1:]]
    episode = replace(attempt.episode, scenario_id=row.scenario.id, messages=messages)
    full_attempt: Attempt = replace(attempt, scenario=row.scenario, episode=episode)
    try:
        return math.fsum(weight * rule.score(full_attempt).total for weight, rule in rules)
    except VerdictNeeded:
        return "asks a judge model, which is not played"
    except (JudgeFailure, UserCodeError) as error:
        return text_of(error)


if __name__ == "__main__":
    run_check(PlayedCheck, check)
