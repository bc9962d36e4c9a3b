"""Counts the bytes of tensors that exist while code runs on tensors without storage."""
# torch's dispatch modes are loosely typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kestrl._shared.plan.memory import MemoryPart

RESIZE = "resize_"
"""Method of a storage that changes its size."""


@dataclass(slots=True)
class _Kept:
    part: MemoryPart
    size: int


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, by what they are for, and the same at the moment of the largest total.

    Used within torch's FakeTensorMode: operations compute shapes only, while autograd keeps and releases tensors as in
    a real step. Working memory within an operation is not seen.

    A storage whose size changes is a gathered layer's: FSDP releases the weights of a layer so, and takes them again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = MemoryPart.BASE
        """What new storages are for."""
        self._kept: weakref.WeakKeyDictionary[torch.UntypedStorage, _Kept] = weakref.WeakKeyDictionary()
        self._now: Counter[MemoryPart] = Counter()
        self._total = self._largest = 0
        self._at_peak: Counter[MemoryPart] = Counter()

    @property
    def now(self) -> Mapping[MemoryPart, int]:
        """Bytes by part."""
        return {part: size for part, size in self._now.items() if size}

    @property
    def peak(self) -> Mapping[MemoryPart, int]:
        """Bytes by part at the moment of the largest total."""
        return {part: size for part, size in self._at_peak.items() if size}

    @contextmanager
    def counting(self, part: MemoryPart) -> Generator[None]:
        """Counts new storages as `part` within the context."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def restart(self) -> None:
        """Forgets the largest total so far."""
        self._largest, self._at_peak = self._total, self._now.copy()

    def recount(self, tensor: Tensor, part: MemoryPart) -> None:
        """Counts an existing tensor's storage as `part`."""
        self._change(self._kept[tensor.untyped_storage()], part)

    def _change(self, record: _Kept, part: MemoryPart, size: int | None = None) -> None:
        """Counts a storage as another part or size."""
        self._count(record.part, -record.size)
        record.part, record.size = part, record.size if size is None else size
        self._count(record.part, record.size)

    def __enter__(self) -> Self:
        super().__enter__()
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            resized_storage = resize(storage, size)
            if storage in self._kept:
                self._change(self._kept[storage], MemoryPart.GATHERED, size)
            return resized_storage

        setattr(torch.UntypedStorage, RESIZE, counted)  # no operation is dispatched
        return self

    def __exit__(self, *raised: Any) -> None:
        setattr(torch.UntypedStorage, RESIZE, self._resize)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1  # the step that the optimizer counts
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                local_tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf  # the whole has a size only
                self._add(local_tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._kept:
            return
        record = self._kept[storage] = _Kept(self.part, storage.nbytes())
        weakref.finalize(storage, self._change, record, record.part, 0)
        self._count(record.part, record.size)

    def _count(self, part: MemoryPart, size: int) -> None:
        self._now[part] += size
        self._total += size
        if self._total > self._largest:
            self._largest, self._at_peak = self._total, self._now.copy()
