"""One optimiser step over a batch of groups. Blind to the algorithm: it gets advantages and behaviour log-probs a token."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kestrl.errors import KestrlError
from kestrl.plan.settings import AlgorithmSettings
from kestrl_learner.algo.losses import LOSSES, Clip
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


def who(row: TrainRow) -> list[str]:
    """Engine and policy of each of a row's sampled tokens, for people."""
    return [f"{engine} on {row.policy}" for engine in row.engines]


def of_older_policies(groups: Sequence[TrainGroup]) -> dict[str, list[TrainGroup]]:
    """By older policy, groups of as few rows as name each of its engines: those of a group together, which share a pass and their prompt."""
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
        self.model, self._algorithm, self._temperature = model, algorithm, temperature
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=algorithm.learning_rate, betas=(0.9, 0.99), weight_decay=algorithm.weight_decay
        )
        self._published: dict[str, dict[str, Tensor]] = {}
        """The adapters that tokens may yet come of, oldest first."""

    def published(self, policy: str) -> None:
        """Keeps the weights as they are, under the name that they are served by, while rollouts of them may be trained on."""
        if not self._algorithm.max_staleness:
            return
        self._published[policy] = {name: weight.clone() for name, weight in self.model.adapter_state().items()}
        while len(self._published) > self._algorithm.max_staleness + 1:
            del self._published[next(iter(self._published))]

    def _set_rate(self, step: int) -> None:
        rise = min(1.0, (step + 1) / (self._algorithm.warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self._algorithm.learning_rate * rise

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult:
        """Forward, backward, clip, update.

        Args:
            groups: The batch.
            step: Optimiser steps done before, for the learning rate.

        Raises:
            NotFinite: Loss or gradient is not finite; nothing was changed.
        """
        self._set_rate(step)
        tokens = sum(group.sampled for group in groups)
        drifts: list[Tensor] = []
        fresh: list[Tensor] = []
        engines: list[Sequence[str]] = []
        again = list(self._scored_again(groups))
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for group in groups:
            with torch.set_grad_enabled(not group.idle):
                for rows, logprobs in self.model.logprobs(group, self._temperature):
                    behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), device=logprobs.device)
                    drifts.append((logprobs.detach() - behaviour).cpu())
                    fresh.append(torch.tensor(stream(rows, [[row.fresh] * len(row.mask) for row in rows])) > 0)
                    engines += [who(row) for row in rows]
                    if not group.idle:
                        loss += self._backward(rows, logprobs, behaviour, tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._algorithm.max_grad_norm))
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {step}: loss {loss}, gradient norm {norm}; lower algorithm.learningRate")
        if any(not group.idle for group in groups):
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
        return StepResult(
            loss=loss,
            grad_norm=norm,
            gap=measure(drifts, fresh, engines, again),
            idle_groups=sum(group.idle for group in groups),
            sampled=tokens,
        )

    def _scored_again(self, groups: Sequence[TrainGroup]) -> Iterator[tuple[Tensor, Sequence[str]]]:
        """Of each engine and each older policy one row, scored by the policy that sampled it.

        By the newest it differs for what was learned since, which says nothing of the engine; where rollouts overlap training there may
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

    def _backward(self, rows: Sequence[TrainRow], logprobs: Tensor, behaviour: Tensor, tokens: int) -> float:
        advantages = torch.tensor(
            stream(rows, [[row.advantage] * len(row.mask) for row in rows]), device=logprobs.device
        )
        algorithm = self._algorithm
        total = LOSSES[algorithm.loss](
            logprobs,
            behaviour,
            advantages,
            clip=Clip(low=algorithm.clip_low, high=algorithm.clip_high),
            importance_cap=algorithm.importance_cap,
        )
        loss = total / tokens
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
