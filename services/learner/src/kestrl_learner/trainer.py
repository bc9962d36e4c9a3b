"""One optimiser step over a batch of groups. Blind to the algorithm, which turns token streams into a loss."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from kestrl.algorithms import Algorithm, TokenBatch, Totals
from kestrl.errors import KestrlError
from kestrl.plan.settings import AlgorithmSettings
from kestrl_learner.algorithms import AGGREGATIONS, make_algorithm
from kestrl_learner.batch import TrainGroup, TrainRow
from kestrl_learner.gap import Gap, measure
from kestrl_learner.model import PolicyModel


class NotFinite(KestrlError):
    """The loss or the gradient is not a number; the weights are as before the step."""

    code = "not_finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did."""

    loss: float
    grad_norm: float
    gap: Gap
    idle_groups: int
    """Groups without an advantage."""
    sampled: int
    """Sampled tokens in the batch."""


def stream(rows: Sequence[TrainRow], values: Sequence[Sequence[float]]) -> list[float]:
    """Values of the sampled tokens of rows, in row order."""
    return [
        value
        for row, listed in zip(rows, values, strict=True)
        for value, on in zip(listed, row.mask, strict=True)
        if on
    ]


def sequence_tokens(group: TrainGroup) -> dict[int, int]:
    """Sampled tokens of each episode of a group that has any."""
    tokens: Counter[int] = Counter()
    for row in group.rows:
        tokens[row.sequence] += sum(row.mask)
    return {sequence: count for sequence, count in tokens.items() if count}


def totals_of(groups: Sequence[TrainGroup]) -> Totals:
    """Counts over a batch."""
    episodes = [sequence_tokens(group) for group in groups]
    return Totals(
        tokens=sum(sum(tokens.values()) for tokens in episodes),
        sequences=sum(map(len, episodes)),
        groups=len(groups),
    )


def who(row: TrainRow) -> list[str]:
    """Engine and policy of each of a row's sampled tokens, for people."""
    return [f"{engine} on {row.policy}" for engine in row.engines]


def of_older_policies(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    """By older policy, groups of as few rows as name each of its engines: those of a group together, which share a pass
    and their prompt.
    """
    seen: dict[str, set[str]] = {}
    chosen: dict[str, list[TrainGroup]] = {}
    for group in groups:
        rows: dict[str, list[TrainRow]] = {}
        for row in group.rows:
            if row.fresh or not row.policy:
                continue
            known = seen.setdefault(row.policy, set())
            if not known.issuperset(row.engines):
                known.update(row.engines)
                rows.setdefault(row.policy, []).append(row)
        for policy, some in rows.items():
            chosen.setdefault(policy, []).append(replace(group, rows=some))
    return chosen


class Trainer:
    """Owns the optimiser."""

    def __init__(self, model: PolicyModel, algorithm: AlgorithmSettings, temperature: float) -> None:
        self.model, self._settings, self._temperature = model, algorithm, temperature
        self.algorithm: Algorithm = make_algorithm(algorithm)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=algorithm.learning_rate, betas=(0.9, 0.99), weight_decay=algorithm.weight_decay
        )
        self._published: dict[str, dict[str, Tensor]] = {}
        """The adapters that tokens may yet come of, oldest first."""

    def published(self, policy: str) -> None:
        """Keeps the weights as they are, under the name that they are served by, while rollouts of them may be trained
        on.
        """
        if not self._settings.max_staleness:
            return
        self._published[policy] = {name: weight.clone() for name, weight in self.model.adapter_state().items()}
        while len(self._published) > self._settings.max_staleness + 1:
            del self._published[next(iter(self._published))]

    def _set_rate(self, step: int) -> None:
        rise = min(1.0, (step + 1) / (self._settings.warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * rise

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult:
        """Forward, backward, clip, update.

        Args:
            groups: The batch.
            step: Optimiser steps done before, for the learning rate.

        Raises:
            NotFinite: Loss or gradient is not finite; nothing was changed.
        """
        self._set_rate(step)
        totals = totals_of(groups)
        drifts: list[Tensor] = []
        fresh: list[Tensor] = []
        engines: list[Sequence[str]] = []
        again = list(self._scored_again(groups))
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for group in groups:
            trained = self._trained(group)
            references = self._references(group) if trained else iter(())
            with torch.set_grad_enabled(trained):
                for rows, logprobs in self.model.logprobs(group, self._temperature):
                    behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), device=logprobs.device)
                    drifts.append((logprobs.detach() - behaviour).cpu())
                    fresh.append(torch.tensor(stream(rows, [[row.fresh] * len(row.mask) for row in rows])) > 0)
                    engines += [who(row) for row in rows]
                    if trained:
                        batch = self._token_batch(group, rows, logprobs, behaviour, next(references), totals)
                        loss += self._backward(batch)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm))
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {step}: loss {loss}, gradient norm {norm}; lower algorithm.learningRate")
        if any(map(self._trained, groups)):
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
        return StepResult(
            loss=loss,
            grad_norm=norm,
            gap=measure(drifts, fresh, engines, again),
            idle_groups=sum(group.idle for group in groups),
            sampled=totals.tokens,
        )

    def _scored_again(self, groups: Sequence[TrainGroup]) -> Iterator[tuple[Tensor, Sequence[str]]]:
        """Of each engine and each older policy one row, scored by the policy that sampled it.

        By the newest it differs for what was learned since, which says nothing of the engine; where rollouts overlap
        training there may
        be no token of the newest policy at all.

        Yields:
            (N,) learner minus engine log-probs of rows' sampled tokens, and who sampled them.
        """
        for policy, some in of_older_policies(groups).items():
            with self.model.weighing(self._published[policy]), torch.no_grad():
                for group in some:
                    for rows, logprobs in self.model.logprobs(group, self._temperature):
                        behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), device=logprobs.device)
                        yield (logprobs - behaviour).cpu(), [name for row in rows for name in who(row)]

    def _trained(self, group: TrainGroup) -> bool:
        """Whether a group has a part in the gradient; a KL term has one in every group."""
        return self.algorithm.needs_reference or not group.idle

    def _references(self, group: TrainGroup) -> Iterator[Tensor | None]:
        """The reference of each part of a group, in the order of `PolicyModel.logprobs`."""
        if not self.algorithm.needs_reference:
            return repeat(None)
        return iter(self.model.reference_logprobs(group, self._temperature))

    def _token_batch(
        self,
        group: TrainGroup,
        rows: Sequence[TrainRow],
        logprobs: Tensor,
        behaviour: Tensor,
        reference: Tensor | None,
        totals: Totals,
    ) -> TokenBatch:
        weigh, horizon, tokens = (
            AGGREGATIONS[self.algorithm.aggregation],
            self._settings.horizon,
            sequence_tokens(group),
        )
        sampled = [sum(row.mask) for row in rows]
        numbers = {sequence: number for number, sequence in enumerate(dict.fromkeys(row.sequence for row in rows))}

        def per_token(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            given = [value for value, count in zip(values, sampled, strict=True) for _ in range(count)]
            return torch.tensor(given, dtype=dtype, device=logprobs.device)

        return TokenBatch(
            logprobs=logprobs,
            behaviour=behaviour,
            reference=reference,
            advantages=torch.tensor(
                stream(rows, [row.advantages for row in rows]), dtype=logprobs.dtype, device=logprobs.device
            ),
            weights=per_token([weigh(tokens.get(row.sequence, 1), totals, horizon) for row in rows], logprobs.dtype),
            sequences=per_token([numbers[row.sequence] for row in rows], torch.long),
            groups=per_token([0] * len(rows), torch.long),
            totals=totals,
        )

    def _backward(self, batch: TokenBatch) -> float:
        loss = self.algorithm.loss(batch)
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
        return float(loss.detach())

    def state(self) -> bytes:
        """Adapter, optimiser and random states, for an exact resume."""
        buffer = io.BytesIO()
        content: dict[str, Any] = {
            "adapter": self.model.adapter_state(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "python_rng": random.getstate(),
        }
        torch.save(content, buffer)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """The inverse of `state`."""
        content: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
        self.model.load_adapter_state(content["adapter"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["torch_rng"])
        random.setstate(content["python_rng"])
