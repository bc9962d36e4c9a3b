"""One optimiser step over a batch of groups. The algorithm computes the loss from token arrays."""

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
from kestrl_learner.logprob_mismatch import LogprobMismatch, measure
from kestrl_learner.model import PolicyModel


class NotFinite(KestrlError):
    """The loss or the gradient is not finite; the weights are unchanged."""

    code = "not_finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step."""

    loss: float
    grad_norm: float
    mismatch: LogprobMismatch
    zero_advantage_groups: int
    """Groups whose advantages are all 0."""
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
    """Number of sampled tokens by episode, without episodes that have none."""
    tokens: Counter[int] = Counter()
    for row in group.rows:
        tokens[row.sequence] += sum(row.mask)
    return {sequence: count for sequence, count in tokens.items() if count}


def totals_of(groups: Sequence[TrainGroup]) -> Totals:
    """Token, sequence and group counts over a batch."""
    episodes = [sequence_tokens(group) for group in groups]
    return Totals(
        tokens=sum(sum(tokens.values()) for tokens in episodes),
        sequences=sum(map(len, episodes)),
        groups=len(groups),
    )


def token_origins(row: TrainRow) -> list[str]:
    """Engine and policy of each of a row's sampled tokens, as text."""
    return [f"{engine} on {row.policy}" for engine in row.engines]


def stale_rows(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    """Rows of older policies, by policy: the fewest rows that cover each of its engines.

    Rows of one group stay together, so that they share their prompt and a pass.
    """
    seen: dict[str, set[str]] = {}
    chosen: dict[str, list[TrainGroup]] = {}
    for group in groups:
        rows: dict[str, list[TrainRow]] = {}
        for row in group.rows:
            if row.on_policy or not row.policy:
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
        """Adapters whose tokens may still be trained on, oldest first."""

    def published(self, policy: str) -> None:
        """Keeps the present weights under their policy's name while its rollouts may be trained on."""
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
            step: Number of optimiser steps done, for the learning rate.

        Raises:
            NotFinite: Loss or gradient is not finite; the weights are unchanged.
        """
        self._set_rate(step)
        totals = totals_of(groups)
        differences: list[Tensor] = []
        on_policy: list[Tensor] = []
        engines: list[Sequence[str]] = []
        older = list(self._older_differences(groups))
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for group in groups:
            trained = self._trained(group)
            references = self._references(group) if trained else iter(())
            with torch.set_grad_enabled(trained):
                for rows, logprobs in self.model.logprobs(group, self._temperature):
                    behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), device=logprobs.device)
                    differences.append((logprobs.detach() - behaviour).cpu())
                    on_policy.append(torch.tensor(stream(rows, [[row.on_policy] * len(row.mask) for row in rows])) > 0)
                    engines += [token_origins(row) for row in rows]
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
            mismatch=measure(differences, on_policy, engines, older),
            zero_advantage_groups=sum(group.zero_advantage for group in groups),
            sampled=totals.tokens,
        )

    def _older_differences(self, groups: Sequence[TrainGroup]) -> Iterator[tuple[Tensor, Sequence[str]]]:
        """Log-prob differences of one row per engine and older policy, scored by the policy that sampled it.

        Differences to the newest policy include what was learned since, and where rollouts overlap training there may
        be no token of the newest policy.

        Yields:
            (N,) learner minus engine log-probs of rows' sampled tokens, and the engine and policy of each.
        """
        for policy, some in stale_rows(groups).items():
            with self.model.with_adapter(self._published[policy]), torch.no_grad():
                for group in some:
                    for rows, logprobs in self.model.logprobs(group, self._temperature):
                        behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), device=logprobs.device)
                        yield (logprobs - behaviour).cpu(), [name for row in rows for name in token_origins(row)]

    def _trained(self, group: TrainGroup) -> bool:
        """Whether a group contributes to the gradient; with a KL term every group does."""
        return self.algorithm.needs_reference or not group.zero_advantage

    def _references(self, group: TrainGroup) -> Iterator[Tensor | None]:
        """Reference log-probs of each part of a group, in the order of `PolicyModel.logprobs`."""
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
