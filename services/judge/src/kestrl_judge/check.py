"""`python -m kestrl_judge.check`: checks that the job's rewards can be loaded."""

from __future__ import annotations

import sys
from typing import Any

from kestrl._shared.checking import run_check
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl.errors import UserInputError
from kestrl.rewards.resolving import resolve
from kestrl_judge.rules import rule_scorers


def check(settings: JudgeSettings) -> dict[str, Any]:
    """Loads every reward; returns no facts.

    Raises:
        UserInputError: Rewards cannot be loaded (one line each), or one is listed twice.
    """
    sys.path[:0] = settings.python_path
    rule_scorers(settings)
    problems: list[str] = []
    for entry in settings.rewards:
        try:
            resolve(entry.rule, field=entry.field, config=entry.config)
        except UserInputError as error:
            problems.append(str(error))
    if problems:
        raise UserInputError("\n".join(problems))
    return {}


if __name__ == "__main__":
    run_check(JudgeSettings, check)
