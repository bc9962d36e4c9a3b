"""What SGLang does not have on a CPU: kernels, seeds, and memory that is not pinned.

Used by the launcher and by the plugin in each of SGLang's processes. Nothing of SGLang's files is changed.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "SGLANG_USE_CPU_ENGINE"
STAND_INS = Path(__file__).with_name("cpu_modules")
"""Folder with modules that stand for those that a CPU does not have."""
BACKEND = "torch_native"
"""SGLang's attention in torch, one sequence at a time: a sequence's result does not depend on its batch."""
CONSTRUCTORS = ("tensor", "zeros", "empty", "arange", "ones", "full")
NAMESPACE, HASH = "sgl_kernel", "murmur_hash32_cpu"
LOW = 0xFFFFFFFF
"""Mask of 32 bits."""
BYTES = 16
"""Length of what is hashed: a seed of 64 bits, a position and a column."""


def is_used() -> bool:
    """Whether this process belongs to an engine on a CPU."""
    return os.environ.get(VARIABLE) == "1"


def add_stand_ins() -> None:
    """Puts the stand-ins behind all other modules, so that real ones come first. SGLang's other processes inherit the
    path.
    """
    if str(STAND_INS) not in sys.path:
        sys.path.append(str(STAND_INS))


def prepare() -> None:
    """Prepares this process, after `add_stand_ins`."""
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():  # its own code then works
        return
    use_pageable_memory(torch)
    add_hash(torch)
    choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    invariant: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    invariant.enable_batch_invariant_mode = skip_gpu_kernels


def use_pageable_memory(torch: Any) -> None:
    """Lets torch ignore the wish for pinned memory, for which it needs a driver of a GPU."""
    for name in CONSTRUCTORS:
        setattr(torch, name, pageable(getattr(torch, name)))
    torch.Tensor.pin_memory = itself


def pageable(constructor: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor of tensors that never pins."""

    @functools.wraps(constructor)
    def construct(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return constructor(*arguments, **options)

    return construct


def itself(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def skip_gpu_kernels(*_: object, **__: object) -> None:
    """Stands for SGLang's matrix products that do not depend on the batch: they are programs for GPUs."""


def add_hash(torch: Any) -> None:
    """Registers the hash of SGLang's sampling with seeds, unless a build with real kernels has it."""
    operations: Any = getattr(torch.ops, NAMESPACE)
    if hasattr(operations, HASH):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{HASH}(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl(HASH, hashed, "CPU")
    setattr(torch.library, f"_kestrl_{HASH}", library)  # which forgets the operation with its last reference


def hashed(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of each row's seed and position with each column, shape [rows, columns].

    Computed with 64-bit integers: products wrap, and their low 32 bits are right.
    """
    import torch

    wide = seed.view(torch.int64) if seed.dtype is torch.uint64 else seed.long()
    state = torch.zeros_like(wide)
    for block in (wide, wide >> 32, positions.long()):
        state = _absorbed(state, block & LOW)
    state = _absorbed(state.unsqueeze(1), (columns.long() & LOW).unsqueeze(0)) ^ BYTES
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & LOW
    return (state ^ (state >> 16)).to(torch.uint32)


def _absorbed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    mixed = _rotated(block * 0xCC9E2D51 & LOW, 15) * 0x1B873593 & LOW
    return _rotated(state ^ mixed, 13) * 5 + 0xE6546B64 & LOW


def _rotated(words: torch.Tensor, places: int) -> torch.Tensor:
    return (words << places | words >> (32 - places)) & LOW
