"""A step over a batch of groups: one optimiser update or, with mini-batches, several. The algorithm computes the loss
from token arrays.
"""

from __future__ import annotations

import io
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kestrl.algorithms import Algorithm, HasTokenMetrics, TokenBatch, Totals
from kestrl.errors import KestrlError
from kestrl.plan.algorithm import AlgorithmSettings
from kestrl_learner.algorithms import AGGREGATIONS, make_algorithm
from kestrl_learner.batch import TrainGroup, TrainRow, estimated
from kestrl_learner.diagnostics import TokenMeans, ratio_diagnostics
from kestrl_learner.logprob_mismatch import LogprobMismatch, measure
from kestrl_learner.model import PolicyModel
from kestrl_learner.optimisation import learning_rate, mini_batches
from kestrl_learner.tokens import sequence_tokens, stale_rows, stream, token_origins, totals_of


class NotFinite(KestrlError):
    """The loss or the gradient is not finite; the weights are unchanged."""

    code = "not_finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step."""

    loss: float
    """Mean over the step's updates."""
    grad_norm: float
    """Before clipping; the largest of the step's updates."""
    mismatch: LogprobMismatch
    zero_advantage_groups: int
    """Groups whose advantages are all 0."""
    sampled: int
    """Sampled tokens in the batch."""
    diagnostics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Means over tokens, quantiles and the learning rate, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A group with the log-probabilities that do not change within a step. Each list has a tensor (N,) for every part
    that `PolicyModel.logprobs` cuts the group into.
    """

    group: TrainGroup
    references: Sequence[Tensor] | None
    """Those of the reference policy; None unless the algorithm needs it."""
    old: Sequence[Tensor] | None
    """Those of the weights that the step began with; None in a step of one update, where they are the current ones."""


class Observed:
    """What the first forward pass of a step shows: log-prob differences to the engines, and entropies."""

    def __init__(self) -> None:
        self.differences: list[Tensor] = []
        self.on_policy: list[Tensor] = []
        self.engines: list[Sequence[str]] = []
        self.means = TokenMeans()

    def add(self, rows: Sequence[TrainRow], logprobs: Tensor, behaviour: Tensor, entropy: Tensor) -> None:
        """Adds a part: its rows, and of each of their sampled tokens the numbers, (N,)."""
        self.differences.append((logprobs.detach() - behaviour).cpu())
        self.on_policy.append(torch.tensor(stream(rows, [[row.on_policy] * len(row.mask) for row in rows])) > 0)
        self.engines += [token_origins(row) for row in rows]
        self.means.add({"entropy": entropy})


class Trainer:
    """Owns the optimiser.

    Args:
        model: Under training.
        algorithm: The job's settings.
        temperature: Of sampling.
        steps: Steps of the whole run, for the learning rate schedule.
    """

    def __init__(
        self, model: PolicyModel, algorithm: AlgorithmSettings, temperature: float, *, steps: int | None = None
    ) -> None:
        self.model, self._settings, self._temperature, self._steps = model, algorithm, temperature, steps
        self.algorithm: Algorithm = make_algorithm(algorithm)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=algorithm.learning_rate,
            betas=(algorithm.adam_beta1, algorithm.adam_beta2),
            weight_decay=algorithm.weight_decay,
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

    def _set_rate(self, step: int) -> float:
        rate = learning_rate(self._settings, step, self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult:
        """Forward, backward, clip and update, once for each mini-batch.

        Args:
            groups: The batch.
            step: Number of steps done, for the learning rate and the mini-batches.

        Raises:
            NotFinite: Loss or gradient is not finite; the weights are unchanged.
        """
        rate = self._set_rate(step)
        older = list(self._older_differences(groups))
        observed, reported = Observed(), TokenMeans()
        prepared = self._prepared(groups, observed)
        losses: list[float] = []
        norms: list[float] = []
        with self._undone_on_failure():
            for batch in mini_batches(prepared, self._settings, step):
                loss, norm = self._update(batch, step, observed, reported)
                losses.append(loss)
                norms.append(norm)
        idle = sum(each.group.zero_advantage for each in prepared)
        return StepResult(
            loss=sum(losses) / len(losses),
            grad_norm=max(norms),
            mismatch=measure(observed.differences, observed.on_policy, observed.engines, older),
            zero_advantage_groups=idle,
            sampled=totals_of(groups).tokens,
            diagnostics={
                **reported.means(),
                **observed.means.means(),
                **ratio_diagnostics(torch.cat([torch.empty(0), *observed.differences])),
                "zero_advantage_share": idle / max(1, len(groups)),
                "learning_rate": rate,
                "updates": float(len(losses)),
            },
        )

    @property
    def _several_updates(self) -> bool:
        return self._settings.mini_batches * self._settings.mini_batch_epochs > 1

    @contextmanager
    def _undone_on_failure(self) -> Generator[None]:
        """Restores weights and optimiser if an update after the first is not finite. A single update changes nothing
        before it is known to be finite.
        """
        if not self._several_updates:
            yield
            return
        weights = [weight.detach().clone() for weight in self.model.parameters()]
        optimizer = deepcopy(self.optimizer.state_dict())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for weight, before in zip(self.model.parameters(), weights, strict=True):
                    weight.copy_(before)
            self.optimizer.load_state_dict(optimizer)
            raise

    def _prepared(self, groups: Sequence[TrainGroup], observed: Observed) -> list[Prepared]:
        """The groups with advantages and the log-probs that hold for the whole step."""
        references: list[list[Tensor] | None] = [None] * len(groups)
        if self.algorithm.needs_reference:
            references = [self.model.reference_logprobs(group, self._temperature) for group in groups]
            if any(group.episodes for group in groups):
                pairs = zip(groups, references, strict=True)
                groups = estimated(
                    [self._with_log_ratios(group, parts or []) for group, parts in pairs], self.algorithm
                )
        return [
            Prepared(group=group, references=parts, old=self._old(group, observed) if self._several_updates else None)
            for group, parts in zip(groups, references, strict=True)
        ]

    def _with_log_ratios(self, group: TrainGroup, references: Sequence[Tensor]) -> TrainGroup:
        """The group whose episodes have log(behaviour / reference) of each of their tokens."""
        by_row: dict[int, list[float]] = {}
        for (rows, sizes), reference in zip(self.model.parts(group), references, strict=True):
            behaviour = torch.tensor(stream(rows, [row.behaviour for row in rows]), dtype=torch.float64)
            ratios = iter([float(value) for value in behaviour - reference.cpu()])
            by_row |= {id(row): list(islice(ratios, size)) for row, size in zip(rows, sizes, strict=True)}
        episodes = [
            replace(
                episode,
                log_ratios=[value for row in group.rows if row.sequence == number for value in by_row[id(row)]],
            )
            for number, episode in enumerate(group.episodes)
        ]
        return replace(group, episodes=episodes)

    def _old(self, group: TrainGroup, observed: Observed) -> list[Tensor]:
        """Log-probs under the weights that the step begins with, which are observed."""
        found: list[Tensor] = []
        entropies: list[Tensor] = []
        with torch.no_grad():
            for rows, logprobs in self.model.logprobs(group, self._temperature, entropies):
                observed.add(rows, logprobs, self._behaviour(rows), entropies[-1])
                found.append(logprobs)
        return found

    def _behaviour(self, rows: Sequence[TrainRow]) -> Tensor:
        return torch.tensor(stream(rows, [row.behaviour for row in rows]), device=self.model.device)

    def _update(
        self, batch: Sequence[Prepared], step: int, observed: Observed, reported: TokenMeans
    ) -> tuple[float, float]:
        """One optimiser update; returns its loss and gradient norm."""
        totals = totals_of([each.group for each in batch])
        trained = [self._trained(each.group) for each in batch]
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for each, has_gradient in zip(batch, trained, strict=True):
            if has_gradient or each.old is None:  # without a gradient, a group is only observed
                with torch.set_grad_enabled(has_gradient):
                    loss += self._accumulate(each, totals, observed, reported, backward=has_gradient)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm))
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {step}: loss {loss}, gradient norm {norm}; lower algorithm.learningRate")
        if any(trained):
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
        return loss, norm

    def _accumulate(
        self, each: Prepared, totals: Totals, observed: Observed, reported: TokenMeans, *, backward: bool
    ) -> float:
        """Adds a group's gradient; returns its part of the loss."""
        loss = 0.0
        entropies: list[Tensor] | None = [] if each.old is None else None
        for part, (rows, logprobs) in enumerate(self.model.logprobs(each.group, self._temperature, entropies)):
            behaviour = self._behaviour(rows)
            if entropies is not None:
                observed.add(rows, logprobs, behaviour, entropies[-1])
            if backward:
                old = logprobs.detach() if each.old is None else each.old[part]
                reference = None if each.references is None else each.references[part]
                batch = self._token_batch(each.group, rows, logprobs, behaviour, old, reference, totals)
                if isinstance(self.algorithm, HasTokenMetrics):
                    reported.add(self.algorithm.token_metrics(batch))
                loss += self._backward(batch)
        return loss

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
                        yield (
                            (logprobs - self._behaviour(rows)).cpu(),
                            [name for row in rows for name in token_origins(row)],
                        )

    def _trained(self, group: TrainGroup) -> bool:
        """Whether a group contributes to the gradient; with a KL term every group does."""
        return self.algorithm.needs_reference or not group.zero_advantage

    def _token_batch(
        self,
        group: TrainGroup,
        rows: Sequence[TrainRow],
        logprobs: Tensor,
        behaviour: Tensor,
        old: Tensor,
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
            old=old,
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
