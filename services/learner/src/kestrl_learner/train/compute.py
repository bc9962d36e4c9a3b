"""The part of a run that computes: the model and its trainer, in this process alone or on several ranks.

Rank 0 is the learner. It orders each operation, and every rank, rank 0 too, performs it with its own `RankWork`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.plan.sft import SFTSettings
from kestrl.algorithms import Algorithm
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.concurrency import finished
from kestrl_learner.model.adapters import AdapterSource, load_policy
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.ranks.group import RankGroup
from kestrl_learner.train.trainer import StepResult, Trainer

Result = TypeVar("Result")
ComputeSettings = LearnerSettings | SFTSettings
"""Settings of a run whose steps are computed in one process or on several ranks."""


def release_cache(device: str) -> None:
    """Gives memory that torch keeps for later tensors back to a device."""
    if device != "cpu":
        torch.accelerator.empty_cache()


def leaves_device(settings: ComputeSettings) -> bool:
    """Whether the base is in host memory between the learner's turns."""
    return isinstance(settings, LearnerSettings) and settings.base_offload


class TrainerSteps(Protocol):
    """What training needs of a trainer; see `Trainer` for the meaning of each."""

    @property
    def algorithm(self) -> Algorithm: ...

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult: ...

    def logprob_sum(self, groups: Sequence[TrainGroup]) -> tuple[float, int]: ...

    def published(self, policy: str) -> None: ...

    def state(self) -> bytes: ...

    def restore(self, state: bytes) -> None: ...


class Compute(Protocol):
    """The model and its trainer, wherever they are."""

    @property
    def model(self) -> AdapterSource: ...

    def trainer(self, steps: int) -> TrainerSteps:
        """A new trainer.

        Args:
            steps: Steps of the whole run.
        """
        ...

    def take_device(self) -> None:
        """Begins a turn on a device that engines use in turns with the learner: brings the base back to it."""
        ...

    def leave_device(self) -> None:
        """Ends a turn: moves the base to host memory if it does not stay, and gives memory back that torch keeps.

        Raises:
            PlaceError: Host memory does not hold the base.
        """
        ...

    @asynccontextmanager
    async def on_device(self) -> AsyncGenerator[None]:
        """A turn within the context: what computes in it must have ended with it."""
        try:
            await finished(self.take_device)
            yield
        finally:
            await finished(self.leave_device)


class RankWork:
    """The model and the trainer of one rank. Every rank performs the same operations in the same order.

    Args:
        group: The ranks; None for a learner of one process.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self._group = group
        self._settings: ComputeSettings | None = None
        self._model: PolicyModel | None = None
        self._trainer: Trainer | None = None

    @property
    def model(self) -> PolicyModel:
        assert self._model is not None, "the model is loaded first"
        return self._model

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "the trainer is made before it is used"
        return self._trainer

    def load(self, settings: ComputeSettings) -> None:
        """Loads the model that the run begins with.

        Raises:
            UserInputError: The base or the adapter cannot be used.
        """
        self._settings = settings
        if self._group is None:
            self._model = load_policy(settings)
            return
        sys.path[:0] = [path for path in settings.python_path if path not in sys.path]
        torch.set_num_threads(settings.threads or max(1, cores() // settings.ranks_per_pod))
        self._model = load_policy(settings, self._group)

    def train(self, steps: int) -> None:
        """Makes the trainer of a run of so many steps."""
        assert self._settings is not None, "the model is loaded first"
        self._trainer = Trainer(
            self.model, self._settings.algorithm, self._settings.temperature, steps=steps, ranks=self._group
        )

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult:
        return self.trainer.step(groups, step)

    def logprob_sum(self, groups: Sequence[TrainGroup]) -> tuple[float, int]:
        return self.trainer.logprob_sum(groups)

    def published(self, policy: str) -> None:
        self.trainer.published(policy)

    def state(self) -> bytes:
        return self.trainer.state()

    def restore(self, state: bytes) -> None:
        self.trainer.restore(state)

    def score(self, token_ids: Sequence[int], adapter: bool) -> list[float]:
        return self.model.score(token_ids, adapter=adapter)

    def take_device(self) -> None:
        self.model.base_weights.come_back()

    def leave_device(self) -> None:
        assert self._settings is not None, "the model is loaded first"
        self.model.network.zero_grad(set_to_none=True)  # an update leaves its gradients
        if leaves_device(self._settings):
            self.model.base_weights.leave()
        release_cache(self._settings.device)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class OneProcess(Compute):
    """The model and its trainer in this process."""

    def __init__(self, settings: ComputeSettings) -> None:
        self._work = RankWork()
        self._work.load(settings)
        if leaves_device(settings):
            self.leave_device()

    @property
    def model(self) -> PolicyModel:
        return self._work.model

    def trainer(self, steps: int) -> Trainer:
        self._work.train(steps)
        return self._work.trainer

    def take_device(self) -> None:
        self._work.take_device()

    def leave_device(self) -> None:
        self._work.leave_device()


class OnRanks(Compute):
    """The model and its trainer on several ranks.

    Args:
        order: Orders an operation of `RankWork` by its name, on every rank; returns rank 0's result.
        work: Rank 0's.
    """

    def __init__(self, order: Callable[..., Any], work: RankWork) -> None:
        self._order, self._work = order, work

    @property
    def model(self) -> AdapterSource:
        return _ModelOnRanks(self._order, self._work.model)

    def trainer(self, steps: int) -> TrainerSteps:
        self._order("train", steps)
        return _StepsOnRanks(self._order, self._work.trainer.algorithm)

    def take_device(self) -> None:
        self._order("take_device")

    def leave_device(self) -> None:
        self._order("leave_device")


class _ModelOnRanks:
    """The adapter is whole on every rank; to compute a score, all are needed."""

    def __init__(self, order: Callable[..., Any], model: PolicyModel) -> None:
        self._order, self._own = order, model
        self.config, self.vocabulary, self.targets = model.config, model.vocabulary, model.targets

    def adapter_state(self) -> dict[str, Tensor]:
        return self._own.adapter_state()

    def score(self, token_ids: Sequence[int], *, adapter: bool) -> list[float]:
        logprobs: list[float] = self._order("score", token_ids, adapter)
        return logprobs


class _StepsOnRanks:
    def __init__(self, order: Callable[..., Any], algorithm: Algorithm) -> None:
        self._order, self.algorithm = order, algorithm

    def step(self, groups: Sequence[TrainGroup], step: int) -> StepResult:
        result: StepResult = self._order("step", groups, step)
        return result

    def logprob_sum(self, groups: Sequence[TrainGroup]) -> tuple[float, int]:
        sum_and_count: tuple[float, int] = self._order("logprob_sum", groups)
        return sum_and_count

    def published(self, policy: str) -> None:
        self._order("published", policy)

    def state(self) -> bytes:
        state: bytes = self._order("state")
        return state

    def restore(self, state: bytes) -> None:
        self._order("restore", state)
