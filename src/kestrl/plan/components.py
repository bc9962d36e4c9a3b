"""What a component is: one process to run, whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kestrl.credentials import Secret, held_by
from kestrl.plan.settings import ServiceSettings


class Role(StrEnum):
    """The parts of a job."""

    ENGINE = "engine"
    """The inference engine itself."""
    INFERENCE = "inference"
    """The engine agent beside it."""
    ROLLOUT = "rollout"
    TOOLS = "tools"
    JUDGE = "judge"
    LEARNER = "learner"


TORCH_DEFAULTS: Mapping[str, str] = {"GOMP_SPINCOUNT": "2000"}
"""libgomp's threads wait busily without a bound by default, which beside other programs makes torch some twenty times slower.

torch's matrix products (MKL, oneDNN) use the same threads. Every component has it: a tool, a reward or a loop may use torch too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """How a component says that it is ready."""

    port: int
    http_path: str | None = None
    """An HTTP path that answers 200; without it the standard gRPC health service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a component computes on."""

    profile: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One process."""

    name: str
    """Role and ordinal, such as `rollout-0`."""
    role: Role
    module: str
    """Python module to run: `python -m MODULE ARGS`."""
    args: tuple[str, ...] = ()
    """Arguments beside `--settings`."""
    settings: ServiceSettings | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    env_defaults: Mapping[str, str] = field(default_factory=lambda: TORCH_DEFAULTS)
    """Variables that one of the same name in the user's environment takes precedence over."""
    ports: Mapping[str, int] = field(default_factory=dict[str, int])
    ready: Ready | None = None
    device: Device = Device(profile="cpu", count=0)
    restarts: bool = True
    """Whether it is started again when it exits by itself; whatever is killed is. The learner's exit is the run's end."""

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """The credentials that it is given: those of its role."""
        return held_by(self.role)
