"""Rules of the learner's memory settings, the same for an AgentRLJob and an SFTJob."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.problems import Problem

OFFLOAD = "spec.learner.activationOffload"
LAYERS = "spec.learner.checkpointedLayers"


def offload_problems(*, offload: bool, checkpointing: bool, on_cpu: bool) -> Iterator[Problem]:
    """Problems of `learner.activationOffload`.

    Args:
        offload: The setting.
        checkpointing: `learner.gradientCheckpointing`.
        on_cpu: Whether the learner computes on a CPU.
    """
    if not offload:
        return
    if not checkpointing:
        yield Problem(OFFLOAD, "moves the inputs of checkpointed layers: set learner.gradientCheckpointing to true")
    if on_cpu:
        yield Problem(OFFLOAD, "saves nothing on a CPU, where activations are in host memory already; remove it")


def checkpointing_problems(*, layers: int | None, checkpointing: bool) -> Iterator[Problem]:
    """Problems of `learner.checkpointedLayers`.

    Args:
        layers: The setting.
        checkpointing: `learner.gradientCheckpointing`.
    """
    if layers is not None and not checkpointing:
        yield Problem(
            LAYERS, "are those of gradient checkpointing: set learner.gradientCheckpointing to true, or remove it"
        )
