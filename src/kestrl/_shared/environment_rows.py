"""What an environment is reset with: the columns of a row."""

from __future__ import annotations

from typing import Any

from kestrl.episode import Json, Scenario

ANSWER, GROUND_TRUTH = "answer", "ground_truth"


def reset_arguments(scenario: Scenario) -> dict[str, Json]:
    """The columns of a row, as keyword arguments of `reset`: those without a meaning for KestRL, and the prompt and the
    ground truth where there are some.
    """
    columns: dict[str, Any] = dict(scenario.metadata)
    if scenario.messages:
        columns.setdefault("prompt", list(scenario.messages))
    if scenario.ground_truth is not None and ANSWER not in columns:
        columns.setdefault(GROUND_TRUTH, scenario.ground_truth)
    return columns
