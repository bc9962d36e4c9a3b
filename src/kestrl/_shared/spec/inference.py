"""The models of the inference engines and of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_serializer

from kestrl._shared.spec.model import LARGEST_CONTEXT, Model
from kestrl._shared.spec.scalars import Name
from kestrl.engines import EngineName

VERSION = r"^[0-9]+(\.[0-9]+){0,3}[0-9A-Za-z.+-]*$"
"""A release such as 0.32 or 0.32.1, or a build such as 0.32.1+cu130."""


def is_version(version: str, required_version: str) -> bool:
    """Whether a version is the wanted one: `0.32` stands for its patch releases and their builds."""
    return version == required_version or f"{version.partition('+')[0]}.".startswith(f"{required_version}.")


class Accelerator(Model):
    """Devices of a component."""

    profile: Name = "cpu"
    """cpu, nvidia or ascend, or a profile of the cluster."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices per replica."""


MOST_ENGINES = 256


class ReplicaRange(Model):
    """Bounds of a number of replicas that others move: `kubectl scale`, an autoscaler, `kestrl scale`."""

    min: Annotated[int, Field(ge=1, le=MOST_ENGINES)]
    """Number at the start."""
    max: Annotated[int, Field(ge=1, le=MOST_ENGINES)]

    @property
    def fixed(self) -> bool:
        """Whether there is one number alone, which the manifest sets."""
        return self.min == self.max

    def nearest(self, number: int) -> int:
        """The number of the range that is nearest to another."""
        return min(max(number, self.min), self.max)

    @model_serializer
    def _serialized(self) -> int | dict[str, int]:
        return self.min if self.fixed else {"min": self.min, "max": self.max}


def _as_range(replicas: object) -> object:
    """A number as a range of itself.

    Raises:
        ValueError: It is neither a number of engines nor a range.
    """
    if isinstance(replicas, Mapping | ReplicaRange):
        return cast("object", replicas)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= MOST_ENGINES:
        raise ValueError(f"must be a number from 1 to {MOST_ENGINES}, or a range such as {{min: 1, max: 4}}")
    return {"min": replicas, "max": replicas}


def _in_order(replica_range: ReplicaRange) -> ReplicaRange:
    if replica_range.max < replica_range.min:
        raise ValueError(f"max ({replica_range.max}) is below min ({replica_range.min}); raise it")
    return replica_range


_BOUND: Mapping[str, Any] = {"type": "integer", "minimum": 1, "maximum": MOST_ENGINES}
_RANGE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"min": _BOUND, "max": _BOUND},
    "required": ["min", "max"],
    "additionalProperties": False,
}
Replicas = Annotated[
    ReplicaRange,
    BeforeValidator(_as_range),
    AfterValidator(_in_order),
    WithJsonSchema({"anyOf": [_BOUND, _RANGE]}),
]
"""A number, or `{min, max}`."""


class Inference(Model):
    """The inference engines."""

    engine: EngineName = "vllm"
    """Engine software."""
    python: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Interpreter that has the engine, such as ~/vllm/bin/python; relative to the manifest, on a cluster in the image.
    Default: an installed engine that fits (`kestrl engine install`), else KestRL's own; in an image `python`."""
    version: Annotated[str, Field(pattern=VERSION, max_length=64)] | None = None
    """Version that the engine must have: "0.32" stands for each of its patch releases. Default: any."""
    replicas: Replicas = ReplicaRange(min=1, max=1)
    """Number of engines, or `{min, max}` in which others scale it."""
    accelerator: Accelerator = Accelerator()
    sharing: Literal["split", "turns"] = "split"
    """Use of a device that engine and learner share on one machine: at once, or the engine sleeps during updates."""
    context_length: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 4096
    """Maximum tokens of one sequence. On one machine the default is at most the number of the model's positions."""
    adapter_slots: Annotated[int, Field(ge=1, le=128)] = 4
    """Maximum adapter versions in an engine; at least maxStaleness + 2."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of one engine, on profile cpu. More threads than cores, over all engines, are several times
    slower."""
    args: dict[str, str | int | float | bool] = {}
    """Additional arguments of the engine's server, such as `max-num-seqs: 64`; `true` is a flag without a value."""
