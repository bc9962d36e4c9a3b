"""All the Python of a user's own agent: one tool, one reward. Plain functions; nothing is subclassed or registered."""

import re

from kestrl.rewards import Attempt, Score

STOCK = {
    "lamp": 12,
    "chair": 4,
    "desk": 7,
    "shelf": 31,
    "rug": 0,
    "mirror": 9,
    "vase": 18,
    "clock": 5,
    "stool": 23,
    "bench": 2,
}


def count_stock(item: str) -> dict[str, int]:
    """Says how many of an item are in stock.

    Args:
        item: Name of the item in the singular, such as "lamp".
    """
    return {item: STOCK.get(item.strip().lower(), 0)}


def found_it(attempt: Attempt) -> Score:
    """1 for the right number, 0.2 for having asked the tool."""
    numbers = re.findall(r"\d+", attempt.episode.final_text)
    correct = numbers[-1:] == [str(attempt.scenario.ground_truth)]
    asked = any(call.outcome == "ok" for call in attempt.episode.tool_calls)
    return Score(value=1.0 * correct + 0.2 * asked, metrics={"answer_correct": correct, "asked": asked})
