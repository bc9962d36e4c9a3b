"""The places of a gang: how ranks of other pods join the learner, and how it learns that one of them is gone.

A gang is all ranks of one process of rank 0, with that process's store. A rank takes its place once; it leaves only
with the gang. Everything here is in the store.
"""
# The distributed package has partial annotations; values from it are annotated here.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from kestrl_learner.ranks.group import EXIT_LOST, FOREVER, RankLost, lost_ranks, meet

log = logging.getLogger(__name__)
GANG, COMPLETE, LOSS, NEVER = "gang", "complete", "loss", "never"
"""Keys of the store; the last one is never set."""
POLL_SECONDS = 0.5
CHECK_SECONDS, CHECK_LIMIT, CHECKS = 10.0, 20.0, 3
"""Interval of a rank's checks that its gang still exists, the time limit of one, and failed ones in a row that end the
rank: the end of a node closes no connection."""


class Loss(NamedTuple):
    """The end of a rank in another pod."""

    message: str
    failed: bool
    """Whether the rank failed by itself, so that a restart would fail again."""


def place(rank: int) -> str:
    """The store's key of a rank's place."""
    return f"place/{rank}"


def open_gang(store: Store, count: int) -> str:
    """Makes the store that of a new gang, which ranks can join; returns the gang's id.

    Args:
        store: Rank 0's.
        count: Number of ranks.
    """
    gang = uuid4().hex
    store.set(GANG, json.dumps({"id": gang, "count": count}))
    return gang


def await_places(store: Store, ranks: Sequence[int], waiting: Callable[[str], None], seconds: float) -> None:
    """Waits until ranks of other pods have taken their places, and completes the gang.

    Args:
        store: Rank 0's.
        ranks: Numbers of these ranks.
        waiting: Called with what is missing whenever that changes.
        seconds: Time limit.

    Raises:
        RankLost: Not all came in time; the message names those that are missing.
    """
    ends, reported_ranks = time.monotonic() + seconds, list[int]()
    while missing_ranks := [rank for rank in ranks if not store.check([place(rank)])]:
        rank_names = f"ranks {', '.join(map(str, missing_ranks))} of other pods"
        if time.monotonic() >= ends:
            raise RankLost(f"{rank_names} did not join within {seconds:g} s; their pods' events and logs say why")
        if missing_ranks != reported_ranks:
            waiting(f"waits for {rank_names}")
            reported_ranks = missing_ranks
        time.sleep(POLL_SECONDS)
    store.set(COMPLETE, "")


def gang_of(store: Store, count: int) -> str:
    """The id of the gang that a store is for.

    Args:
        store: Connection to rank 0's.
        count: Number of ranks that this rank was started for.

    Raises:
        RankLost: The gang has ended, or has another number of ranks.
    """
    with lost_ranks("joining"):
        gang = json.loads(store.get(GANG))
    if gang["count"] != count:
        raise RankLost(f"the learner has {gang['count']} ranks, and this rank was started for {count}")
    return str(gang["id"])


def take_place(store: Store, rank: int) -> None:
    """Takes a rank's place and waits until the gang is complete.

    Until then a rank that is started again replaces its predecessor. A complete gang cannot be joined: it has lost the
    rank, which is reported to it, and the end of its store is awaited, since the learner may stay for a while.

    Args:
        store: Connection to rank 0's.
        rank: Number of this rank.

    Raises:
        RankLost: The gang was complete and has ended, or another process has taken the place.
    """
    with lost_ranks("joining"):
        if store.check([COMPLETE]):
            if not store.check([LOSS]):
                report_loss(store, Loss(f"rank {rank} ended and was started again", failed=False))
            log.warning("the gang of this learner is complete and has lost rank %d; its end is awaited", rank)
            store.wait([NEVER], FOREVER)
        token = uuid4().hex
        store.set(place(rank), token)
        store.wait([COMPLETE], FOREVER)
        if store.get(place(rank)).decode() != token:
            raise RankLost(f"another process has taken the place of rank {rank}")


def report_loss(store: Store, loss: Loss) -> None:
    """Reports the end of a rank to rank 0."""
    store.set(LOSS, json.dumps(loss._asdict()))


def await_loss(address: str, count: int) -> Loss | None:
    """Waits for the first report of a loss; None if the store was closed, or `end_watch` was called.

    Args:
        address: `host:port` of rank 0's store. The wait has a connection of its own, since one that waits is blocked.
        count: Number of ranks.
    """
    try:
        store = meet(address, count)
        store.wait([LOSS], FOREVER)
        reported = json.loads(store.get(LOSS))
    except (RankLost, dist.DistError):
        return None
    return None if reported is None else Loss(**reported)


def end_watch(store: Store) -> None:
    """Ends the wait of `await_loss`."""
    store.set(LOSS, json.dumps(None))


def leave_with(gang: str, address: str, count: int, exit_process: Callable[[int], object] = os._exit) -> None:
    """Ends this process when the learner at the address is not that of the gang any more, or does not answer.

    Args:
        gang: Id of the gang.
        address: `host:port` of rank 0's store; its name is resolved again for each check.
        count: Number of ranks.
        exit_process: Ends this process at once with a status.
    """
    threading.Thread(
        target=_check_gang, args=(gang, address, count, exit_process), name="check-gang", daemon=True
    ).start()


def _check_gang(gang: str, address: str, count: int, exit_process: Callable[[int], object]) -> None:
    failed = 0
    while failed < CHECKS:
        time.sleep(CHECK_SECONDS)
        try:
            current_gang = str(json.loads(meet(address, count, seconds=CHECK_LIMIT).get(GANG))["id"])
        except (RankLost, dist.DistError) as error:
            failed += 1
            log.warning("rank 0 does not answer at %s: %s", address, error)
            continue
        if current_gang != gang:
            log.error("the learner at %s has started again; this rank ends, to join it", address)
            break
        failed = 0
    exit_process(EXIT_LOST)
