"""A step over a batch of groups: one optimiser update or, with mini-batches, several. The algorithm computes the loss
from token arrays.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl.algorithms import Algorithm, HasTokenMetrics, TokenBatch, Totals
from kestrl.errors import KestrlError
from kestrl.storage.episodes import TrainedTokens
from kestrl_learner.algorithms import make_algorithm
from kestrl_learner.batch.rows import TrainGroup, TrainRow, estimated
from kestrl_learner.batch.token_batch import token_batch
from kestrl_learner.batch.tokens import stale_rows, stream, token_origins, totals_of
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.model.trained_model import TrainedModel
from kestrl_learner.ranks.group import OneRank, Ranks
from kestrl_learner.train.diagnostics import TokenMeans, ratio_diagnostics
from kestrl_learner.train.logprob_mismatch import LogprobMismatch
from kestrl_learner.train.observed import Computed, Observed, with_log_ratios
from kestrl_learner.train.optimisation import learning_rate, mini_batches
from kestrl_learner.train.passes import Key, Pass, PassKind, by_episode, computed_share, of_pass, schedule
from kestrl_learner.train.trained_tokens import trained_tokens


class RanksDiffer(KestrlError):
    """The ranks hold different adapters, so that their steps were not the same; checkpoints before are whole."""

    code = "ranks_differ"


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
    tokens: Sequence[Mapping[int, TrainedTokens]] = ()
    """What was computed on the tokens of each group's episodes, by position in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The groups of a step, with the log-probabilities that do not change within it, (N,) of each episode."""

    groups: Sequence[tuple[int, TrainGroup]]
    """With their numbers in the batch."""
    references: Mapping[Key, Tensor] | None
    """Those of the reference policy; None unless the algorithm needs it."""
    old: Mapping[Key, Tensor] | None
    """Those of the weights that the step began with; None in a step of one update, where they are the current ones."""


class Trainer:
    """Owns the optimiser.

    Args:
        model: Under training.
        algorithm: The job's settings.
        temperature: Of sampling.
        steps: Steps of the whole run, for the learning rate schedule.
        ranks: The processes that compute each step together. Every one has a trainer, and its methods are called in the
            same order with the same arguments.
    """

    def __init__(
        self,
        model: TrainedModel,
        algorithm: AlgorithmSettings,
        temperature: float,
        *,
        steps: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self._settings, self._temperature, self._steps = model, algorithm, temperature, steps
        self._ranks: Ranks = ranks or OneRank()
        self.algorithm: Algorithm = make_algorithm(algorithm)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=algorithm.learning_rate,
            betas=(algorithm.adam_beta1, algorithm.adam_beta2),
            weight_decay=algorithm.weight_decay,
            foreach=model.updates_together,
        )
        self._published: dict[str, dict[str, Tensor]] = {}
        """Adapters whose tokens may still be trained on, oldest first."""

    def published(self, policy: str) -> None:
        """Keeps a copy of the present weights, which updates change in place, while its rollouts may be trained on."""
        if not self._settings.max_staleness:
            return
        self._published[policy] = {name: weight.clone() for name, weight in self.model.trained_state().items()}
        while len(self._published) > self._settings.token_staleness + 1:
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
        older = self._older_differences(groups)  # before the update, since it puts older weights in place for a while
        observed, reported = Observed(), TokenMeans()
        prepared = self._prepared(groups, observed)
        losses: list[float] = []
        norms: list[float] = []
        with self._undone_on_failure():
            for batch in mini_batches(prepared.groups, self._settings, step):
                loss, norm = self._update(batch, step, prepared, observed, reported)
                losses.append(loss)
                norms.append(norm)
        self._add_observations(observed, reported)
        passes = self._passes(list(enumerate(groups)))
        mismatch, differences = observed.mismatch(passes, older)
        idle = sum(group.zero_advantage for _, group in prepared.groups)
        return StepResult(
            loss=sum(losses) / len(losses),
            grad_norm=max(norms),
            mismatch=mismatch,
            zero_advantage_groups=idle,
            sampled=totals_of(groups).tokens,
            tokens=trained_tokens([group for _, group in prepared.groups], observed.differences),
            diagnostics={
                **reported.means(),
                **observed.means.means(),
                **ratio_diagnostics(differences),
                "zero_advantage_share": idle / max(1, len(groups)),
                "computed_tokens_share": computed_share(passes),
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
        except BaseException:  # a cancelled step as well: a checkpoint of half a step could not be resumed
            with torch.no_grad():
                for weight, before in zip(self.model.parameters(), weights, strict=True):
                    weight.copy_(before)
            self.optimizer.load_state_dict(optimizer)
            raise

    def _add_observations(self, observed: Observed, reported: TokenMeans) -> None:
        """Adds what the other ranks observed."""
        observed.settle()
        observed.means.settle()
        reported.settle()
        everyone = self._ranks.gather((observed.differences, observed.means, reported))
        for number, (differences, means, metrics) in enumerate(everyone):
            if number != self._ranks.rank:
                observed.differences |= differences
                observed.means.merge(means)
                reported.merge(metrics)

    def _passes(self, groups: Sequence[tuple[int, TrainGroup]], *, backward: bool = False) -> list[Pass]:
        """All passes over groups, which are given with their numbers in the batch."""
        return [
            Pass(
                pieces=pieces,
                kind=PassKind(shared=self.model.shares_prompt(pieces[0].group.prompt), backward=backward),
                tokens=self.model.tokens_of(pieces),
            )
            for pieces in self.model.passes(groups, least_passes=self._ranks.count)
        ]

    def _computed(self, passes: Sequence[Pass], *, entropies: bool = False) -> Iterator[Computed]:
        """Computes this rank's share of passes. The backward pass of each must follow before the next is taken."""
        for kind, one_pass in schedule(passes, self._ranks):
            with torch.set_grad_enabled(kind.backward):
                if one_pass is None:
                    self.model.empty_pass(shared=kind.shared)  # sharded weights are gathered by all ranks together
                    continue
                pass_entropies: list[Tensor] | None = [] if entropies else None
                logprobs = self.model.pass_logprobs(one_pass.pieces, self._temperature, pass_entropies)
            yield Computed(one_pass, logprobs, pass_entropies[0] if pass_entropies else None)

    def _by_episode(self, passes: Sequence[Pass], values: Sequence[Tensor]) -> Mapping[Key, Tensor]:
        """The values of all ranks' passes by episode, on this rank's device.

        Args:
            passes: This rank's.
            values: (N,) of each.
        """
        by_key = by_episode(passes, values)
        if self._ranks.count > 1:
            everyone = self._ranks.gather({key: value.cpu() for key, value in by_key.items()})
            by_key = {key: tensor.to(self.model.device) for tensors in everyone for key, tensor in tensors.items()}
        return by_key

    def _prepared(self, groups: Sequence[TrainGroup], observed: Observed) -> Prepared:
        """The groups with advantages, and the log-probs that hold for the whole step."""
        references: Mapping[Key, Tensor] | None = None
        if self.algorithm.needs_reference:
            references = self._reference(groups)
            if any(group.episodes for group in groups):
                groups = estimated(
                    [with_log_ratios(group, index, references) for index, group in enumerate(groups)], self.algorithm
                )
        old = self._old(groups, observed) if self._several_updates else None
        return Prepared(groups=list(enumerate(groups)), references=references, old=old)

    def _reference(self, groups: Sequence[TrainGroup]) -> Mapping[Key, Tensor]:
        """Log-probs under the base model."""
        assert isinstance(self.model, PolicyModel), "without an adapter the base is not kept"
        with self.model.without_adapter():
            computed = list(self._computed(self._passes(list(enumerate(groups)))))
        return self._by_episode([forward.which for forward in computed], [forward.logprobs for forward in computed])

    def _old(self, groups: Sequence[TrainGroup], observed: Observed) -> Mapping[Key, Tensor]:
        """Log-probs under the weights that the step begins with, which are observed."""
        computed = list(self._computed(self._passes(list(enumerate(groups))), entropies=True))
        for forward in computed:
            observed.add(forward, self._behaviour(forward.which.rows))
        return self._by_episode([forward.which for forward in computed], [forward.logprobs for forward in computed])

    def _behaviour(self, rows: Sequence[TrainRow]) -> Tensor:
        return torch.tensor(stream(rows, [row.behaviour for row in rows]), device=self.model.device)

    def _update(
        self,
        batch: Sequence[tuple[int, TrainGroup]],
        step: int,
        prepared: Prepared,
        observed: Observed,
        reported: TokenMeans,
    ) -> tuple[float, float]:
        """One optimiser update of some of the prepared groups; returns its loss and gradient norm."""
        totals = totals_of([group for _, group in batch])
        self.optimizer.zero_grad(set_to_none=True)
        passes = self._passes_of_update(batch)
        losses: list[Tensor] = []
        for computed in self._computed(passes, entropies=not self._several_updates):
            losses += self._accumulate(prepared, computed, totals, observed, reported)
        weights = self.model.parameters()
        # Sums, not means: `totals` count the tokens of all ranks, so that each holds a share of one mean already.
        self._ranks.add([weight.grad for weight in weights if weight.grad is not None])
        norm_on_device = torch.nn.utils.clip_grad_norm_(weights, self._settings.max_grad_norm)
        # Read last: until here nothing has waited for the device.
        losses_of_passes = torch.stack(losses) if losses else torch.zeros(0)
        parts = cast("list[float]", losses_of_passes.tolist())  # pyright: ignore[reportUnknownMemberType]
        loss = sum(self._ranks.gather(sum(parts)))
        norm = float(norm_on_device)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"step {step + 1}: loss {loss}, gradient norm {norm}; lower algorithm.learningRate")
        if any(one_pass.kind.backward for one_pass in passes):
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
            torch.autograd.graph.increment_version(weights)  # a fused optimizer does not count its changes
        return loss, norm

    def _passes_of_update(self, batch: Sequence[tuple[int, TrainGroup]]) -> list[Pass]:
        """The passes of an update. Groups without a gradient are only observed, and skipped if they have been."""
        trained = [(index, group) for index, group in batch if self._trained(group)]
        unused = [] if self._several_updates else [(index, group) for index, group in batch if not self._trained(group)]
        return self._passes(trained, backward=True) + self._passes(unused)

    def _accumulate(
        self, prepared: Prepared, computed: Computed, totals: Totals, observed: Observed, reported: TokenMeans
    ) -> list[Tensor]:
        """Adds a pass's gradient; returns its part of the loss, if it has one."""
        which, logprobs, entropy = computed
        behaviour = self._behaviour(which.rows)
        if entropy is not None:
            observed.add(computed, behaviour)
        if not which.kind.backward:
            return []
        batch = token_batch(
            which.pieces,
            logprobs=logprobs,
            behaviour=behaviour,
            old=logprobs.detach() if prepared.old is None else of_pass(prepared.old, which),
            reference=None if prepared.references is None else of_pass(prepared.references, which),
            totals=totals,
            aggregation=self.algorithm.aggregation,
            horizon=self._settings.horizon,
        )
        if isinstance(self.algorithm, HasTokenMetrics):
            reported.add(self.algorithm.token_metrics(batch))
        return [self._backward(batch)]

    def _older_differences(self, groups: Sequence[TrainGroup]) -> list[tuple[Tensor, Sequence[str]]]:
        """Log-prob differences of tokens of each engine and older policy, scored by the policy that sampled them.

        Differences to the newest policy include what was learned since, and where rollouts overlap training there may
        be no token of the newest policy.

        Returns:
            (N,) learner minus engine log-probs of tokens, and the engine and policy of each.
        """
        of_rank: list[tuple[Tensor, Sequence[str]]] = []
        for policy, stale in stale_rows(groups).items():
            with self.model.with_trained_state(self._published[policy]):
                for which, logprobs, _ in self._computed(self._passes(list(enumerate(stale)))):
                    is_of_policy = [name == policy for row in which.rows for name in row.policies]
                    origins = [name for row in which.rows for name in token_origins(row)]
                    difference = (logprobs - self._behaviour(which.rows)).cpu()
                    of_rank.append((difference[torch.tensor(is_of_policy)], list(compress(origins, is_of_policy))))
        return [difference for stale in self._ranks.gather(of_rank) for difference in stale]

    def logprob_sum(self, groups: Sequence[TrainGroup]) -> tuple[float, int]:
        """Sum and number of the log-probs of all sampled tokens under the present weights."""
        total, count = 0.0, 0
        for _, logprobs, _ in self._computed(self._passes(list(enumerate(groups)))):
            total += float(logprobs.sum())
            count += len(logprobs)
        everyone = self._ranks.gather((total, count))
        return sum(rank_sum for rank_sum, _ in everyone), sum(number for _, number in everyone)

    def _trained(self, group: TrainGroup) -> bool:
        """Whether a group contributes to the gradient; with a KL term every group does."""
        return self.algorithm.needs_reference or not group.zero_advantage

    def _backward(self, batch: TokenBatch) -> Tensor:
        loss = self.algorithm.loss(batch)
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
        return loss.detach()

    def state(self) -> bytes:
        """Weights under training, optimiser and random states, for an exact resume on any number of ranks.

        Raises:
            RanksDiffer: The ranks hold different adapters.
        """
        trained = self.model.trained_state()
        if self._ranks.count > 1:
            digests = self._ranks.gather(hashlib.sha256(save(trained)).hexdigest())
            if len(set(digests)) > 1:
                raise RanksDiffer(f"the adapter's digests by rank are {', '.join(digests)}; resume from a checkpoint")
        buffer = io.BytesIO()
        content: dict[str, Any] = {
            "adapter": trained,
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "python_rng": random.getstate(),
        }
        torch.save(content, buffer)
        return buffer.getvalue()

    def restore(self, state: bytes) -> None:
        """The inverse of `state`."""
        content: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)  # nothing in a stored file is run
        self.model.load_trained_state(content["adapter"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["torch_rng"])
        random.setstate(content["python_rng"])
