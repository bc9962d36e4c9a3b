"""The tokens of an episode, with what the engine reported and training computed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kestrl.episode import Episode, Row, Turn
from kestrl.storage.episodes import TrainedTokens


class TokenFacts(NamedTuple):
    """What is known of one token."""

    position: int
    id: int
    sampled: bool
    logprob: float | None
    """Under the policy that sampled it; None of a given token."""
    learner: float | None
    """Log-prob under the weights that the step began with; None unless it was trained on."""
    advantage: float | None
    policy: str
    engine: str


def row_tokens(episode: Episode, tokens: TrainedTokens | None) -> Sequence[Sequence[TokenFacts]]:
    """The tokens of each row.

    Args:
        episode: The episode.
        tokens: What training computed on its sampled tokens.
    """
    computed = None if tokens is None else iter(zip(tokens.learner_logprobs, tokens.advantages, strict=True))
    return [
        list(_tokens(row, [turn for turn in episode.turns if turn.row == number], computed))
        for number, row in enumerate(episode.rows)
    ]


def _tokens(row: Row, turns: Sequence[Turn], computed: Iterator[tuple[float, float]] | None) -> Iterator[TokenFacts]:
    sampled_by = {position: turn for turn in turns for position in range(turn.start, turn.end)}
    for position, (token, mask) in enumerate(zip(row.token_ids, row.mask, strict=True)):
        learner, advantage = next(computed) if mask and computed is not None else (None, None)
        turn = sampled_by.get(position)
        yield TokenFacts(
            position=position,
            id=token,
            sampled=bool(mask),
            logprob=row.logprobs[position] if mask else None,
            learner=learner,
            advantage=advantage,
            policy="" if turn is None else turn.policy,
            engine="" if turn is None else turn.engine,
        )
