"""Base of the manifest's models: strictness, names, bounded numbers, and fields that several kinds have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """Base model: frozen, camelCase aliases, refuses unknown fields, no implicit type conversion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def listed(entries: Mapping[str, str]) -> str:
    """The names of a registry, with what is said of some of them, for the description of a field."""
    return ", ".join(f"`{name}` ({summary})" if summary else f"`{name}`" for name, summary in entries.items())


LARGEST_INT = 2**31 - 1
"""Upper bound of counts and sizes without their own maximum."""
MOST_SAMPLES = 1024
"""Episodes of each question in an evaluation."""
LARGEST_CONTEXT = 16 * 1024 * 1024
"""Tokens."""
LARGEST_SEED = 2**53 - 1
"""Largest integer that every JSON parser represents exactly."""
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Positive = Annotated[float, Field(gt=0, strict=False)]
NonNegative = Annotated[float, Field(ge=0, strict=False)]


class Passes(Model):
    """What the learner's passes compute and keep, the same for an AgentRLJob and an SFTJob."""

    gradient_checkpointing: bool = False
    """Keep the inputs of layers only, and compute the rest again in the backward pass: less memory, more work."""
    checkpointed_layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of the first layers to which gradientCheckpointing applies; others are computed once. Default: all."""
    activation_offload: bool = False
    """On devices other than a CPU: keep these inputs in host memory meanwhile. Needs gradientCheckpointing."""
    compile_layers: bool = False
    """Compile the layers when the model is loaded: takes minutes and a C++ compiler. Where it fails, the log warns."""
    tokens_per_pass: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 16_384
    """Maximum tokens of one forward and backward pass, padding included; activations are in proportion to it."""
