"""Rules of the learner's memory settings, the same for an AgentRLJob and an SFTJob."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.problems import Problem

OFFLOAD = "spec.learner.activationOffload"


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
