"""Base of the manifest's models: strictness, names, and bounded numbers."""

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
