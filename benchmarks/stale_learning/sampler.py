"""Sampling of episodes with the learner's own weights, all of them at once."""
# transformers has loose types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.stale_learning.lookups import Play
from torch import Tensor
from transformers import DynamicCache

from kestrl_learner.model.policy_model import PolicyModel


class Sampler:
    """Plays episodes to their ends.

    Args:
        policy: Whose present weights sample.
        seed: Of the draws.
    """

    def __init__(self, policy: PolicyModel, seed: int) -> None:
        self._policy, self._chance = policy, torch.Generator().manual_seed(seed)

    def play(self, plays: Sequence[Play]) -> None:
        """Samples the turns that episodes lack. Rows of different lengths are padded on the left; a row whose episode
        has ended stays until half of the rows have.
        """
        running = [play for play in plays if not play.has_ended]
        if not running:
            return
        with torch.no_grad():
            rows = [_prefix(play) for play in running]
            state = _Rows(self._policy.network, rows)
            while True:
                first, first_logprobs = self._draw(state)
                state.append(first[:, None])
                second, second_logprobs = self._draw(state)
                answers: list[list[int]] = []
                for play, *sampled in zip(
                    running,
                    first.tolist(),
                    second.tolist(),
                    first_logprobs.tolist(),
                    second_logprobs.tolist(),
                    strict=True,
                ):
                    if not play.has_ended:
                        play.turns.append((sampled[0], sampled[1]))
                        play.behaviour.append((sampled[2], sampled[3]))
                    answers.append([0, 0] if play.has_ended else play.answer())
                kept = [place for place, play in enumerate(running) if not play.has_ended]
                if not kept:
                    return
                if 2 * len(kept) <= len(running):
                    state.keep(kept)
                    running = [running[place] for place in kept]
                    answers, second = [answers[place] for place in kept], second[kept]
                state.append(torch.cat([second[:, None], torch.tensor(answers)], dim=1))

    def _draw(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        """A token of each row and its log-probability, (rows,) each."""
        logprobs = rows.logits.log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=self._chance)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


class _Rows:
    """Rows that are sampled together, with the keys and values of their tokens."""

    def __init__(self, network: Any, rows: Sequence[Sequence[int]]) -> None:
        width = max(map(len, rows))
        self._network, self._cache = network, DynamicCache()
        self._padding = torch.zeros((len(rows), 0), dtype=torch.long)
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
        self._forward(ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]))

    def _forward(self, ids: Tensor, padding: Tensor) -> None:
        self._padding = torch.cat([self._padding, padding], dim=1)
        places = (self._padding.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._network(
            input_ids=ids,
            attention_mask=self._padding,
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits: Tensor = output.logits[:, -1].float()
        """Logits of the next token, (rows, vocabulary)."""

    def append(self, ids: Tensor) -> None:
        """Computes more tokens of each row."""
        self._forward(ids, torch.ones_like(ids))

    def keep(self, places: Sequence[int]) -> None:
        """Removes all other rows."""
        index = torch.tensor(places)
        self._cache.batch_select_indices(index)
        self._padding = self._padding[index]


def _prefix(play: Play) -> list[int]:
    ids = play.prompt + play.tokens()[0]
    return ids + play.answer() if play.turns else ids
