"""Learning rate of a step, and the mini-batches of its updates. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kestrl._shared.plan.algorithm import AlgorithmSettings

Item = TypeVar("Item")


def learning_rate(settings: AlgorithmSettings, step: int, steps: int | None) -> float:
    """The learning rate of a step.

    Args:
        settings: Peak, warm-up, schedule and final share.
        step: Steps done.
        steps: Steps of the whole run; None where they are not known, which keeps the rate constant.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if settings.learning_rate_schedule == "constant" or steps is None:
        return settings.learning_rate
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps))
    decay = (
        1.0 - progress if settings.learning_rate_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    final = settings.final_learning_rate_share
    return settings.learning_rate * (final + (1.0 - final) * decay)


def mini_batches(items: Sequence[Item], settings: AlgorithmSettings, step: int) -> Iterator[list[Item]]:
    """The items of each update of a step: every item once an epoch, in sizes that differ by one at most.

    One update has all items in their order; several have them shuffled by the step's number, so that a resumed run
    repeats the step.
    """
    parts = max(1, min(settings.mini_batches, len(items)))
    for epoch in range(settings.mini_batch_epochs):
        order = list(items)
        if parts * settings.mini_batch_epochs > 1:
            random.Random(f"{step}/{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
        borders = [len(order) * part // parts for part in range(parts + 1)]
        yield from (order[borders[part] : borders[part + 1]] for part in range(parts))
