"""Components: processes to run, on one machine or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kestrl._shared.credentials import Secret, held_by
from kestrl._shared.plan.settings.common import SettingsModel


class Role(StrEnum):
    """Roles of components."""

    ENGINE = "engine"
    """The inference engine itself."""
    INFERENCE = "inference"
    """The engine agent beside it."""
    ROLLOUT = "rollout"
    AGENT = "agent"
    """The user's agent in pods of its own image, on a cluster."""
    TOOLS = "tools"
    FILES = "files"
    """What fetches the files that tools read, on a cluster."""
    JUDGE = "judge"
    MLFLOW = "mlflow"
    """What sends the run to MLflow, on a cluster."""
    LEARNER = "learner"
    RANKS = "ranks"
    """Ranks of the learner in pods of their own, on a cluster."""


USUAL_WORKERS = 16
"""Workers up to which what serves them is sized alike, so that scaling restarts none of it."""
TORCH_DEFAULTS: Mapping[str, str] = {"GOMP_SPINCOUNT": "2000"}
"""Threads of libgomp busy-wait without a bound by default, which makes torch about twenty times slower beside other
programs.

Matrix products of torch (MKL, oneDNN) use the same threads. Set for every component, since tools, rewards and loops may
use torch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Readiness check of a component."""

    port: int
    http_path: str | None = None
    """HTTP path that answers 200; if None, the standard gRPC health service is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Devices of a component."""

    profile: str
    count: int
    indices: tuple[str, ...] = ()
    """Their indices on one machine; empty where a device plugin assigns them."""


class SecretKey(NamedTuple):
    """An entry of a secret of the user."""

    secret: str
    key: str
    field: str
    """Manifest field that references it, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One process."""

    name: str
    """Role and ordinal, such as `rollout-0`."""
    role: Role
    module: str
    """Python module to run: `python -m MODULE ARGS`."""
    python: str | None = None
    """Interpreter that runs it; None for that of the program, or of its image."""
    args: tuple[str, ...] = ()
    """Arguments in addition to `--settings`."""
    settings: SettingsModel | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    env_defaults: Mapping[str, str] = field(default_factory=lambda: TORCH_DEFAULTS)
    """Defaults of variables; values in the user's environment take precedence."""
    ports: Mapping[str, int] = field(default_factory=dict[str, int])
    ready: Ready | None = None
    device: Device = Device(profile="cpu", count=0)
    restarts: bool = True
    """Whether the component is restarted when it exits by itself; killed components always are. The learner's exit ends
    the run."""

    stop_seconds: float = 40.0
    """Seconds between SIGTERM and SIGKILL on one machine: longer than it takes to drain."""
    own_secrets: tuple[Secret, ...] = ()
    """Credentials in addition to those of the role."""
    user_secrets: Mapping[str, SecretKey] = field(default_factory=dict[str, SecretKey])
    """Environment variables from the user's secrets."""

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """Credentials of the component: those of its role, and its own."""
        return (*held_by(self.role), *self.own_secrets)
