"""Counts the bytes of tensors that exist while code runs on tensors without storage."""
# torch's dispatch modes are loosely typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kestrl.plan.memory import Part


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, by what they are for, and the same at the moment of the largest total.

    Used within torch's FakeTensorMode: operations compute shapes only, while autograd keeps and releases tensors as in
    a real step. Working memory within an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = Part.BASE
        """What new storages are for."""
        self._kept: weakref.WeakKeyDictionary[torch.UntypedStorage, list[Part]] = weakref.WeakKeyDictionary()
        self._now: Counter[Part] = Counter()
        self._total = self._largest = 0
        self._at_peak: Counter[Part] = Counter()

    @property
    def now(self) -> Mapping[Part, int]:
        """Bytes by part."""
        return {part: size for part, size in self._now.items() if size}

    @property
    def peak(self) -> Mapping[Part, int]:
        """Bytes by part at the moment of the largest total."""
        return {part: size for part, size in self._at_peak.items() if size}

    @contextmanager
    def counting(self, part: Part) -> Generator[None]:
        """Counts new storages as `part` within the context."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def recount(self, tensor: Tensor, part: Part) -> None:
        """Counts an existing tensor's storage as `part`."""
        storage = tensor.untyped_storage()
        owner, size = self._kept[storage], storage.nbytes()
        self._now[owner[0]] -= size
        self._now[part] += size
        owner[0] = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1  # the step that the optimizer counts
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._kept:
            return
        owner, size = [self.part], storage.nbytes()
        self._kept[storage] = owner
        weakref.finalize(storage, self._remove, owner, size)
        self._now[self.part] += size
        self._total += size
        if self._total > self._largest:
            self._largest, self._at_peak = self._total, self._now.copy()

    def _remove(self, owner: list[Part], size: int) -> None:
        self._now[owner[0]] -= size
        self._total -= size
