"""Starts the process of a rank. Without torch, which a pod of ranks does not need itself."""

from __future__ import annotations

import subprocess
import sys


def rank_command(rank: int, count: int, per_machine: int, address: str, device: str) -> list[str]:
    """The command line of a rank.

    Args:
        rank: Its number.
        count: Number of ranks.
        per_machine: Ranks of each machine.
        address: `host:port` of rank 0's store.
        device: Type of the ranks' devices.
    """
    numbers = ["--rank", str(rank), "--count", str(count), "--per-machine", str(per_machine)]
    return [sys.executable, "-m", "kestrl_learner.rank", *numbers, "--store", address, "--device", device]


def start_rank(rank: int, count: int, per_machine: int, address: str, device: str) -> subprocess.Popen[bytes]:
    """Starts a rank, which writes to this process's log. The arguments are those of `rank_command`."""
    command = rank_command(rank, count, per_machine, address, device)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - this program
