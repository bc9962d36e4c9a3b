"""Rewards and the agent loop of reverse-text and alphabet-sort, after the environments of the same names in
`verifiers`.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any

from kestrl.agents import Conversation
from kestrl.episode import StopReason
from kestrl.rewards import Attempt, Score

REVERSED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
SORTED = re.compile(r"<(combined_)?alphabetical_sorted>(.*?)</\1?alphabetical_sorted>", re.DOTALL)
LONGEST = 4000
"""Characters of an answer that are compared: the comparison takes quadratic time."""


def _similarity(given: str, expected: str) -> float:
    """Ratio of difflib, from 0 to 1, which both environments use."""
    return SequenceMatcher(None, given[:LONGEST], expected).ratio()


def reversed_text(attempt: Attempt, tags: bool = True) -> Score:
    """Similarity of the answer and the reversed text.

    Args:
        attempt: The episode.
        tags: Whether the answer stands in `<reversed_text>`; an answer without them is then worth 0.
    """
    text = attempt.episode.final_text
    found = REVERSED.findall(text) if tags else [text]
    answer = found[-1].strip() if found else ""
    expected = str(attempt.scenario.ground_truth)
    return Score(value=_similarity(answer, expected), metrics={"answer_correct": float(answer == expected)})


def sorted_names(attempt: Attempt, power: int = 4) -> Score:
    """Mean over the turns of the similarity of the list and the expected one, raised to a power.

    Args:
        attempt: The episode. A turn that it did not reach is worth 0.
        power: Exponent, so that nearly right lists are worth clearly less than right ones.
    """
    listed: Any = attempt.scenario.ground_truth
    expected = [str(text) for text in listed]
    texts = [turn.text for turn in attempt.episode.turns]
    texts += [""] * (len(expected) - len(texts))
    similarities = [_similarity(_sorted(text), wanted) for text, wanted in zip(texts, expected, strict=False)]
    return Score(
        value=sum(similarity**power for similarity in similarities) / len(expected),
        metrics={"answer_correct": float(all(similarity == 1 for similarity in similarities))},
    )


def _sorted(text: str) -> str:
    found = SORTED.findall(text)
    return "\n".join(line.strip() for line in found[-1][1].strip().splitlines()) if found else ""


async def follow_ups(conversation: Conversation) -> None:
    """Asks the row's question, then each of its `follow_ups`."""
    if await conversation.generate() is None:
        return
    for question in conversation.scenario.metadata["follow_ups"]:
        conversation.append_user(question)
        if await conversation.generate() is None:
            return
    conversation.stop(StopReason.ANSWERED)
