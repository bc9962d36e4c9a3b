"""The schedule: order of scenarios, number of steps, seeds, bound by staleness. Pure."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The ordinals of an epoch in the order in which they are run; the same after a resume."""
    order = list(range(size))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)  # noqa: S311 - reproducible, not a secret
    return order


def total_steps(size: int, epochs: int, groups_per_step: int, max_steps: int | None) -> int:
    """Full steps of the scenarios of all epochs, at most `max_steps`; scenarios left over are dropped at the end."""
    steps = size * epochs // groups_per_step
    return steps if max_steps is None else min(steps, max_steps)


def group_seed(seed: int, epoch: int, ordinal: int) -> int:
    """The sampling seed of a group, in [0, 2^31): the same when a group is retried."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{ordinal}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def admissible(*, version: int, max_staleness: int, groups_per_step: int, consumed: int, outstanding: int) -> int:
    """Groups that may be started now without any becoming too stale, if groups are consumed in order.

    Groups ever started and kept must not exceed (max_staleness + version + 1) x groups_per_step (AReaL,
    infra/staleness_manager.py): with staleness 0 nothing starts while a step trains.

    Args:
        version: Step of the newest published policy.
        max_staleness: Allowed age in steps.
        groups_per_step: Groups of one step.
        consumed: Groups consumed by steps so far, the one being trained on included.
        outstanding: Groups running, or finished and waiting.
    """
    return max(0, (max_staleness + version + 1) * groups_per_step - consumed - outstanding)


def affordable(
    *, step: int, max_staleness: int, groups_per_step: int, ready: Sequence[int], running: Sequence[int]
) -> bool:
    """Whether a step can take groups now, the oldest policy's first, without making any other too old to be trained on.

    A group sampled by version v can be taken by steps up to v + max_staleness, and each later step takes
    groups_per_step: what is left must fit into them in the order of these deadlines. Waiting for running groups makes
    it fit, since admission never starts more groups of a version than the steps up to its deadline take.

    Args:
        step: The step that would take groups_per_step of the ready groups.
        max_staleness: Allowed age in steps.
        groups_per_step: Groups of one step.
        ready: Policy versions of the groups that have ended.
        running: Policy versions of the groups that run.
    """
    versions_left = sorted([*sorted(ready)[groups_per_step:], *running])
    return all(
        place < groups_per_step * (version + max_staleness - step) for place, version in enumerate(versions_left)
    )
