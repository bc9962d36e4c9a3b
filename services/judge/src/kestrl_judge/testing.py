"""Conformance suite of `Scorer`: what combining rewards relies on, for a component of one's own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace

from kestrl.episode import Group
from kestrl.episode.codec import group_to_proto
from kestrl.errors import Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.scoring import ScoredGroup, Scorer, open_all

SECONDS = 120.0
"""Time limit of one call of a scorer."""


async def check_scorer(make: Callable[[], Scorer], group: Group, *, max_turns: int = 8) -> None:
    """Checks a component, which is opened and closed several times.

    Args:
        make: Makes the scorer, unopened.
        group: Episodes that did not fail, at least two, as the component expects them.
        max_turns: Limit of turns of an episode, which the group keeps.

    Raises:
        AssertionError: A property does not hold; the message names it.
        UserInputError: The scorer cannot be used.
        TimeoutError: A call does not end.
    """
    assert len(group.episodes) > 1, "the suite needs a group of at least two episodes"
    scorer = make()
    _check_description(scorer)
    async with asyncio.timeout(5 * SECONDS):
        await open_all([scorer])
        try:
            _check_verdicts(await _score(scorer, group, max_turns), group, max_turns)
            group_of_one = replace(group, episodes=group.episodes[:1])
            _check_verdicts(await _score(scorer, group_of_one, max_turns), group_of_one, max_turns)
            await _check_groups_at_once(scorer, group, max_turns)
            await _check_cancellation(scorer, group, max_turns)
        finally:
            await scorer.close()
        await _check_close_during_a_score(make(), group, max_turns)


async def _score(scorer: Scorer, group: Group, max_turns: int) -> ScoredGroup:
    return await scorer.score(EncodedGroup(group_to_proto(group).SerializeToString()), max_turns=max_turns)


def _check_description(scorer: Scorer) -> None:
    assert scorer.name, "a component has a name"
    assert scorer.name == scorer.name.strip(), "the name of a component has no blanks around it"
    assert math.isfinite(scorer.weight), "the weight of a component is finite"
    if scorer.gate is not None:
        assert scorer.gate.component != scorer.name, "a component is not its own gate"


def _check_verdicts(scored: ScoredGroup, group: Group, max_turns: int) -> None:
    ids = {episode.id for episode in group.episodes}
    assert set(scored.verdicts) == ids, "every episode of the group has a verdict, and no other one"
    assert set(scored.episodes) <= ids, "what is reported of episodes is of those of the group"
    for report in (scored.details, *scored.episodes.values()):
        json.dumps(report, allow_nan=False)
    for verdict in scored.verdicts.values():
        if isinstance(verdict, Failure):
            assert verdict.code, "a failure has a code"
            continue
        assert isinstance(verdict, Score), "a verdict is a score or a failure"
        figures = (verdict.total, *verdict.turns, *verdict.metrics.values())
        assert all(math.isfinite(figure) for figure in figures), "a score is finite; what has none is a failure"
        assert len(verdict.turns) <= max_turns, "no turn is scored that the episode cannot have"


async def _check_groups_at_once(scorer: Scorer, group: Group, max_turns: int) -> None:
    """Scores two groups of other episodes at the same time."""
    groups = [
        replace(
            group,
            id=f"{group.id}-{number}",
            episodes=[replace(episode, id=f"{number}-{episode.id}") for episode in group.episodes],
        )
        for number in range(2)
    ]
    scored = await asyncio.gather(*(_score(scorer, scored_group, max_turns) for scored_group in groups))
    for verdicts, scored_group in zip(scored, groups, strict=True):
        _check_verdicts(verdicts, scored_group, max_turns)


async def _check_cancellation(scorer: Scorer, group: Group, max_turns: int) -> None:
    """A caller that goes away leaves a scorer that scores the next group."""
    score = asyncio.create_task(_score(scorer, group, max_turns))
    await asyncio.sleep(0)  # it has begun
    score.cancel()
    await asyncio.wait([score])
    async with asyncio.timeout(SECONDS):
        _check_verdicts(await _score(scorer, group, max_turns), group, max_turns)


async def _check_close_during_a_score(scorer: Scorer, group: Group, max_turns: int) -> None:
    """Closing ends a score that is under way: with failures for what has no verdict yet."""
    await open_all([scorer])
    score = asyncio.create_task(_score(scorer, group, max_turns))
    await asyncio.sleep(0)  # it has begun
    await scorer.close()
    async with asyncio.timeout(SECONDS):
        _check_verdicts(await score, group, max_turns)
