"""Patches of the pods of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kestrl._shared.spec.model import Model
from kestrl._shared.spec.scalars import JsonObject

MOST_REMOVED = 32
PodPath = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z]+((\.[A-Za-z]+)|(\[[^\[\]]+\]))+$")]
"""Path of a field of a PodTemplate; an item of a list or map has its name in brackets."""


class Patch(Model):
    """A patch of the pods of one role, merged as by `kubectl patch`: lists of containers, volumes and variables by
    name.
    """

    role: Literal["inference", "rollout", "agent", "tools", "judge", "learner"]
    """Role of the pods."""
    template: JsonObject = {}
    """Fields of a PodTemplate: `metadata` (labels, annotations) and `spec`."""
    remove: Annotated[list[PodPath], Field(max_length=MOST_REMOVED)] = []
    """Fields and items to remove, such as `spec.containers[tools].livenessProbe`. `null` in `template` does the same,
    but a plain `kubectl apply` drops it."""
