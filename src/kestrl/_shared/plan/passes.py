"""What a forward pass of the learner computes and keeps. Pure."""

from __future__ import annotations

from typing import Any

from kestrl._shared.spec.job import Learner
from kestrl._shared.spec.sft import SFTLearner


def pass_settings(learner: Learner | SFTLearner) -> dict[str, Any]:
    """The fields of `PassSettings` by the manifest."""
    return {
        "gradient_checkpointing": learner.gradient_checkpointing,
        "checkpointed_layers": learner.checkpointed_layers,
        "activation_offload": learner.activation_offload,
        "tokens_per_pass": learner.tokens_per_pass,
    }
