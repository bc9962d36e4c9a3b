"""Ranks as processes of their own, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from kestrl_learner.ranks.group import LOOPBACK, RankGroup, meet, meeting_point

Job = Callable[..., Any]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["peft", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"])


def _rank(
    rank: int, count: int, port: int, device: str, seconds: float, out: Connection, job: Job, given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup(meet(f"{LOOPBACK}:{port}", count), rank, count, device, seconds=seconds)
    try:
        out.send(job(ranks, *given))
    except Exception as error:  # noqa: BLE001 - raised again in the test
        out.send(error)
    finally:
        ranks.leave()


def on_ranks(count: int, job: Job, *given: Any, device: str = "cpu", seconds: float = 60.0) -> list[Any]:
    """Runs `job(ranks, *given)` on several ranks; returns what each returned or raised, None if it ended without.

    The job and everything given and returned must be picklable; tensors as numpy arrays.
    """
    store = meeting_point(count)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, count, store.port, device, seconds, out, job, given))
        for rank, (_, out) in enumerate(pipes)
    ]
    for process, (_, out) in zip(processes, pipes, strict=True):
        process.start()
        out.close()
    found: list[Any] = []
    for receiving, _ in pipes:
        try:
            found.append(receiving.recv())
        except EOFError:
            found.append(None)
        receiving.close()
    for process in processes:
        process.join()
    return found
