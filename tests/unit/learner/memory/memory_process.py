"""Measures the peak memory of optimiser steps: a case of JSON for each line of input, a number of bytes each."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl._shared.plan.memory import GIVE_BACK, MemorySettings
from kestrl_learner.memory.estimate import longest_group
from kestrl_learner.model.adapters import load_policy
from kestrl_learner.model.full_model import load
from kestrl_learner.ranks.group import RankGroup
from kestrl_learner.train.trainer import Trainer

STATUS = Path("/proc/self/status")


def kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found, name
    return int(found[1])


def measured(
    asked: MemorySettings, algorithm: AlgorithmSettings, updates: int = 2, ranks: RankGroup | None = None
) -> int:
    """Bytes by which the resident memory of this process rises at most in steps of a model that it loads."""
    gc.collect()
    before = kilobytes("VmRSS")
    policy = load_policy(asked.policy, ranks) if asked.parameters == "adapter" else load(asked.policy)
    trainer = Trainer(policy, algorithm, 1.0, ranks=ranks)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for step in range(updates):
        trainer.step([longest_group(asked)] * asked.groups, step)
    return (kilobytes("VmHWM") - before) * 1024


M_MMAP_THRESHOLD = -3


def measured_on_rank(ranks: RankGroup, cases: list[tuple[MemorySettings, MemorySettings]], settings: Any) -> list[int]:
    """`measured` on one of several ranks after a small step each. glibc is set by a call: a forked process has the
    variables of its parent.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(GIVE_BACK["MALLOC_MMAP_THRESHOLD_"]))
    found: list[int] = []
    for small, step in cases:
        measured(small, settings, ranks=ranks)
        found.append(measured(step, settings, ranks=ranks))
    return found


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        asked = [MemorySettings.model_validate(case[name]) for name in ("warm_up", "asked")]
        algorithm = AlgorithmSettings.model_validate(case["algorithm"])
        measured(asked[0], algorithm)  # loads libraries and kernels
        sys.stdout.write(f"{measured(asked[1], algorithm)}\n")


if __name__ == "__main__":
    main()
