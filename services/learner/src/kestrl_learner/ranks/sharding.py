"""Sharding of the base model over ranks by PyTorch's FSDP2: each layer is gathered when it is computed.

Embeddings, the head and the adapter are whole on every rank: the head computes log-probabilities outside of the model's
own forward pass, and the adapter is small, so that its gradient is summed once an update instead of in every pass.
"""
# transformers and torch.distributed have loose types; values from them are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kestrl.errors import UserInputError


def shard_layers(model: Any, body: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the weights of each layer over the ranks, in place.

    Args:
        model: The transformers model, with its adapter.
        body: Its part below the head.
        mesh: One dimension, the ranks.

    Raises:
        UserInputError: The family does not name its layers.
    """
    names: set[str] = set(model._no_split_modules or ())
    layers = [module for module in body.modules() if type(module).__name__ in names]
    if not layers:
        raise UserInputError("spec.learner.accelerator.count: this family of models cannot be sharded; use 1")
    adapter = {weight for weight in body.parameters() if weight.requires_grad}
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=adapter)
    sharded = {weight for layer in layers for weight in layer.parameters()}
    unsharded = {weight for weight in body.parameters() if weight not in sharded}
    fully_shard(body, mesh=mesh, ignored_params=adapter | unsharded)
    _release_file(model)


@torch.no_grad()
def _release_file(model: nn.Module) -> None:
    """Copies the frozen weights that stay whole: as long as one is of the file that was mapped into memory to load
    them, all of that file counts as this process's memory.
    """
    for weight in model.parameters():
        if not (weight.requires_grad or isinstance(weight, DTensor)):
            weight.data = weight.data.clone()
