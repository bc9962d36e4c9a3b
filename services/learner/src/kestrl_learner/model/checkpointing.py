"""Gradient checkpointing of all or some layers of a model."""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kestrl.errors import UserInputError


def layers_of(network: nn.Module) -> list[nn.Module]:
    """The layers that gradient checkpointing can apply to, in their order."""
    return [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(network: Any, count: int | None) -> None:
    """Applies gradient checkpointing.

    Args:
        network: A model of transformers, with or without an adapter of peft.
        count: Number of the first layers that keep their inputs only; None is all.

    Raises:
        UserInputError: The model's family has no such layers, or the model has fewer.
    """
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = layers_of(network)
    if not layers:
        raise UserInputError("spec.learner.gradientCheckpointing: this family of models does not support it")
    if count is not None and count > len(layers):
        raise UserInputError(f"spec.learner.checkpointedLayers is {count}, and the model has {len(layers)} layers")
    # The first ones, since the backward pass begins with the others, whose activations are gone by then.
    for layer in layers[:count]:
        layer.training = True  # the layer's own flag: its parts stay in evaluation, without dropout
