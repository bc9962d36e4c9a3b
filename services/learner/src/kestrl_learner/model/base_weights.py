"""The frozen weights of a model under training: on its device, or in host memory while an engine has the device."""
# torch's annotations of modules and of the CUDA runtime are partial; values from them are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kestrl.errors import KestrlError, PlaceError

ALIGNMENT = 512
"""Bytes to whose multiples the places of weights in the host buffer are rounded up."""


class BaseAway(KestrlError):
    """The base is in host memory, so that nothing can be computed with the model."""

    code = "base_away"


class DeviceFull(KestrlError):
    """The base does not fit the device: an engine that sleeps, or another program, holds more than was planned."""

    code = "device_full"


class BaseWeights:
    """The weights of a network without a gradient. Those that modules share stay shared; buffers stay on the device.

    They do not change, so that they are copied to the host once, and afterwards only from it.

    Args:
        network: On its device.
        device: The device.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._network, self._device = network, device
        self._host: Mapping[nn.Parameter, Tensor] | None = None
        self._guards: list[RemovableHandle] = []

    @property
    def away(self) -> bool:
        """Whether they are in host memory alone."""
        return bool(self._guards)

    def leave(self) -> None:
        """Frees their memory on the device. Until they are back, every module of the network raises `BaseAway`.

        Raises:
            PlaceError: The host has no memory for them that a device can read.
        """
        if self._host is None:
            self._host = self._copied()
        if not self.away:
            self._guards = [module.register_forward_pre_hook(_refuse) for module in self._network.modules()]
        for weight in self._host:  # some are there if they could not all come back
            weight.data = weight.data.new_empty(0)

    def come_back(self) -> None:
        """Puts them on the device again, as they were. No effect if they are there.

        Raises:
            DeviceFull: It does not hold them.
        """
        if self._host is None or not self.away:
            return
        try:
            for weight, copy in self._host.items():
                weight.data = torch.empty_like(copy, device=self._device).copy_(copy, non_blocking=True)
        except torch.OutOfMemoryError as error:
            raise DeviceFull(f"the base does not fit the device in the learner's turn: {error}") from error
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _copied(self) -> dict[nn.Parameter, Tensor]:
        """Copies in one buffer of host memory."""
        weights = [weight for weight in self._network.parameters() if not weight.requires_grad]
        try:
            buffer = torch.empty(ends(weights)[-1] if weights else 0, dtype=torch.uint8)
            if self._device.type == "cuda":
                weakref.finalize(self, pin(buffer, torch.cuda.cudart())).atexit = False
        except RuntimeError as error:
            size = sum(weight.nbytes for weight in weights) / 2**30
            raise PlaceError(f"the base's {size:.1f} GiB cannot be kept in host memory: {error}") from error
        copies = dict(zip(weights, views(buffer, weights), strict=True))
        for weight, copy in copies.items():
            copy.copy_(weight.data)
        return copies


def pin(buffer: Tensor, runtime: Any) -> Callable[[], object]:
    """Lets a device copy from a buffer by itself; returns what ends that. A tensor that torch pins would take up to
    twice the memory: its allocator rounds sizes up to powers of two.

    Args:
        buffer: In host memory.
        runtime: CUDA's, as `torch.cuda.cudart` has it.

    Raises:
        RuntimeError: It refuses.
    """
    if code := int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
        raise RuntimeError(f"cudaHostRegister of {buffer.nbytes} bytes: error {code}")
    return partial(runtime.cudaHostUnregister, buffer.data_ptr())


def ends(weights: Sequence[Tensor]) -> list[int]:
    """Places in bytes after each weight in a buffer that holds them one after the other."""
    return list(accumulate(-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights))


def views(buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in a buffer with the shapes, types and strides of weights."""
    starts = [0, *ends(weights)]
    layouts = [torch.empty_like(weight, device="meta") for weight in weights]
    return [
        buffer[start : start + layout.nbytes].view(layout.dtype).as_strided(layout.shape, layout.stride())
        for start, layout in zip(starts, layouts, strict=False)
    ]


def _refuse(module: nn.Module, _arguments: object) -> None:
    raise BaseAway(f"{type(module).__name__}: the base is in host memory while an engine has the device")
