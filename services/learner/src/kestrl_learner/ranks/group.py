"""The ranks of a learner: processes that compute one step together, each with a share of the base model's weights and
of the batch.

What ranks exchange outside of the model's own collectives goes over gloo, also where the model is on accelerators:
gradients of the adapter, and small objects.
"""
# The distributed package has partial annotations; values from it are annotated here.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kestrl.errors import KestrlError, UserInputError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Backends of collectives by type of device."""
COLLECTIVE_SECONDS = 600.0
"""Time limit of one collective: longer than the longest pass of a rank that others wait for."""
FOREVER = timedelta(days=365)
"""Time limit of a wait for what another rank does whenever it is due; the end of rank 0 ends it."""
JOIN_SECONDS = 600.0
"""Time limit for all ranks to start."""
EXIT_LOST = 3
"""Exit code of a rank that ends because another one did."""
LOOPBACK = "127.0.0.1"
Value = TypeVar("Value")


class RankLost(KestrlError):
    """A rank ended or did not answer in time. Every rank ends; the run continues from its checkpoint."""

    code = "rank_lost"
    retryable = True


class Ranks(Protocol):
    """What a step needs of the ranks. Every rank must call the methods in the same order."""

    rank: int
    """Number of this rank; 0 leads."""
    count: int

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their sums over the ranks: the same bits on every rank."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """The value of each rank, in their order, on every rank."""
        ...


class OneRank:
    """A learner of one process."""

    rank, count = 0, 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        pass

    def gather(self, value: Value) -> list[Value]:
        return [value]


class RankGroup:
    """Several ranks that have joined. One at a time in a process.

    Args:
        store: The ranks' meeting point; `meeting_point` makes rank 0's, `meet` that of the others.
        rank: Number of this rank.
        count: Number of ranks.
        device: Type of the devices of all ranks, such as `cpu`; rank N of a machine has its device N.
        seconds: Time limit of one collective.
        per_machine: Ranks of each machine; None if all are on this one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        count: int,
        device: str,
        *,
        seconds: float = COLLECTIVE_SECONDS,
        per_machine: int | None = None,
    ) -> None:
        self.rank, self.count, self.store = rank, count, store
        self._local = rank if per_machine is None else rank % per_machine
        self._turns = 0
        kind = torch.device(device).type
        if kind == "cpu":
            self.device = torch.device("cpu")
        else:
            self.device = torch.device(kind, self._local)
            torch.accelerator.set_device_index(self._local)
        if per_machine is None or per_machine == count:
            # A container's own name may not resolve; in a pod of a StatefulSet it is that of the pod's address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = timedelta(seconds=seconds)
        with lost_ranks("joining"):
            dist.init_process_group(
                BACKENDS[kind], store=PrefixStore("group", store), rank=rank, world_size=count, timeout=limit
            )
            self._objects: Any = None if kind == "cpu" else dist.new_group(backend="gloo", timeout=limit)
            self.mesh: DeviceMesh = init_device_mesh(kind, (count,))

    def add(self, tensors: Sequence[Tensor]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.all_reduce(flat)
            begin = 0
            for tensor in alike:
                tensor.copy_(flat[begin : begin + tensor.numel()].view_as(tensor))
                begin += tensor.numel()

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._objects)
        return values

    @contextmanager
    def turn(self) -> Generator[None]:
        """Runs the block of each rank after that of the rank before on its machine, however that ended."""
        self._turns += 1
        if self._local:
            self.store.wait([f"turn/{self._turns}/{self.rank - 1}"], FOREVER)
        try:
            yield
        finally:
            self.store.set(f"turn/{self._turns}/{self.rank}", "")

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank."""
        boxed: list[Any] = [value]
        dist.broadcast_object_list(boxed, src=0, group=self._objects)
        return boxed[0]

    def leave(self) -> None:
        """Ends the group in this process."""
        dist.destroy_process_group()


@contextmanager
def lost_ranks(doing: str) -> Generator[None]:
    """Raises errors of collectives, which other ranks cause, as `RankLost`.

    Args:
        doing: What this rank is doing, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_collective_error(error):
            raise
        raise RankLost(f"{doing}: another rank ended or did not answer in time: {error}") from error


def is_collective_error(error: BaseException) -> bool:
    """Whether an error comes from a collective. gloo's have no type of their own: their text names its source file."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def meeting_point(count: int, listen: str | None = None) -> TCPStore:
    """Rank 0's store.

    Args:
        count: Number of ranks.
        listen: `host:port` to bind; None for a free port of the loopback interface.

    Raises:
        UserInputError: The port is taken.
    """
    # TCPStore would listen on every interface.
    host, _, port = (listen or f"{LOOPBACK}:0").rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except OSError as error:
        raise UserInputError(f"{listen}: the ranks cannot meet there: {error}") from error
    return TCPStore(
        LOOPBACK,
        int(listener.getsockname()[1]),
        count,
        is_master=True,
        timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def meet(address: str, count: int, *, seconds: float = JOIN_SECONDS) -> TCPStore:
    """A new connection to rank 0's store.

    Args:
        address: `host:port` of the store.
        count: Number of ranks.
        seconds: Time limit of connecting and of operations that have none of their own.

    Raises:
        RankLost: Rank 0 does not listen there.
    """
    host, _, port = address.rpartition(":")
    with lost_ranks("joining"):
        return TCPStore(
            host,
            int(port),
            count,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
