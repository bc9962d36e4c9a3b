"""Plays of a job without a model, and what they say of its environment and its rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl._shared.checking import NOTHING, SOLUTION, TRYING

TOLERANCE = 1e-9
SHORTEST_SOLUTION = 3
"""Characters below which a solution stands in many a prompt by chance."""
MOST_NAMED = 3
"""Rows that a finding names."""
WORDS: Mapping[str, str] = {
    NOTHING: "doing nothing",
    TRYING: "a wrong answer",
    SOLUTION: "the solution",
}


@dataclass(slots=True)
class PlaysVerdict:
    """What the plays of a job have shown."""

    problems: list[str] = field(default_factory=list[str])
    """What has to be fixed before training."""
    warnings: list[str] = field(default_factory=list[str])
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Lowest and highest reward of each kind of play."""

    def add(self, other: PlaysVerdict) -> None:
        """Adds the findings of another check."""
        self.problems += other.problems
        self.warnings += other.warnings

    @property
    def summary(self) -> str:
        """The rewards of each kind, for a person."""
        earnings = (
            (WORDS[name], f"{low:g}" if low == high else f"{low:g} to {high:g}")
            for name, (low, high) in self.ranges.items()
        )
        return ", ".join(f"{word} earns {earned}" for word, earned in earnings)


def verdict(played: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Sequence[float | str]]]) -> PlaysVerdict:
    """Decides on plays. Pure.

    Args:
        played: What was played of each row: its place, its plays by kind, its solution, and whether episodes are apart.
        scored: The reward of each play, or why it has none, by kind and row.
    """
    judgement = PlaysVerdict()
    places = [str(row["place"]) for row in played]
    rewards = [{name: _numbers(play_rewards) for name, play_rewards in row.items()} for row in scored]
    failed: dict[str, list[str]] = {}
    for place, row in zip(places, scored, strict=True):
        for name, several in row.items():
            for reason in dict.fromkeys(play_rewards for play_rewards in several if isinstance(play_rewards, str)):
                failed.setdefault(f"{WORDS[name]} has no reward: {reason}", []).append(place)
    judgement.problems += named(failed)
    for name in WORDS:
        earned = [play_rewards for row in rewards for play_rewards in row.get(name, ())]
        if earned:
            judgement.ranges[name] = (min(earned), max(earned))
    judgement.problems += named(_differing(played, rewards))
    judgement.problems += _order(places, rewards)
    judgement.problems += _constant(judgement.ranges)
    judgement.warnings += named(_leaks(played))
    if not failed and SOLUTION not in judgement.ranges:
        judgement.warnings.append("no row has a solution, so that only doing nothing and a wrong answer were played")
    return judgement


def _numbers(several: Sequence[float | str]) -> list[float]:
    return [float(reward) for reward in several if not isinstance(reward, str)]


def _differing(
    played: Sequence[Mapping[str, Any]], rewards: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[str]]:
    """What is not the same for the same play."""
    findings: dict[str, list[str]] = {}
    for row, earned in zip(played, rewards, strict=True):
        place = str(row["place"])
        for name, several in earned.items():
            if several and max(several) - min(several) > TOLERANCE:
                findings.setdefault(f"{WORDS[name]} earns another reward the second time", []).append(place)
        prompts = {play["prompt"] for several in row["plays"].values() for play in several if "failure" not in play}
        if len(prompts) > 1:
            findings.setdefault("reset shows something else the second time", []).append(place)
        if not row["apart"]:
            findings.setdefault("an episode is changed by another one that is played beside it", []).append(place)
    return findings


def _order(places: Sequence[str], rewards: Sequence[Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """Rows in which a worse play earns as much as a better one."""
    findings: dict[str, list[str]] = {}
    highest = max((max(row[SOLUTION]) for row in rewards if row.get(SOLUTION)), default=None)
    for place, row in zip(places, rewards, strict=True):
        nothing, trying, solution = (row.get(name) or None for name in (NOTHING, TRYING, SOLUTION))
        if nothing and solution and max(nothing) >= min(solution) - TOLERANCE:
            findings.setdefault("doing nothing earns as much as the solution", []).append(place)
        elif nothing and trying and min(nothing) > max(trying) + TOLERANCE:
            findings.setdefault("doing nothing earns more than a wrong answer", []).append(place)
        if solution and trying and max(trying) >= min(solution) - TOLERANCE:
            findings.setdefault("a wrong answer earns as much as the solution", []).append(place)
        if solution and highest is not None and min(solution) < highest - TOLERANCE:
            findings.setdefault(f"the solution does not earn the maximum, which is {highest:g}", []).append(place)
    yield from named(findings)


def _constant(ranges: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """One reward for all plays of all rows, from which nothing can be learned. Where no solution was played, 0 is what
    the others should earn.
    """
    values = {reward for pair in ranges.values() for reward in pair}
    if len(values) == 1 and (SOLUTION in ranges or values != {0.0}):
        yield f"every play of every row earns {values.pop():g}, so that there is nothing to learn from"


def _leaks(played: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    findings: dict[str, list[str]] = {}
    for row in played:
        texts = [solution_text.strip() for solution_text in row["solution"] or () if isinstance(solution_text, str)]
        prompts = [play["prompt"] for play in row["plays"][NOTHING] if "failure" not in play]
        prompt_text = str(row.get("prompt", "")) + "".join(prompts[:1])
        if any(len(text) >= SHORTEST_SOLUTION and text in prompt_text for text in texts):
            findings.setdefault("the solution stands in the prompt", []).append(str(row["place"]))
    return findings


def named(findings: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Findings with the rows in which they are."""
    for finding, places in findings.items():
        unlisted = len(places) - MOST_NAMED
        yield f"{finding}: at {', '.join(places[:MOST_NAMED])}" + (f" and {unlisted} more rows" if unlisted > 0 else "")
