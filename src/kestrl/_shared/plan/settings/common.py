"""What the settings of every service have in common, and how a service reads its file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict

from kestrl.errors import UserInputError

REPLICA_VARIABLE = "KESTRL_REPLICA"
POD_UID_VARIABLE = "KESTRL_POD_UID"
"""Environment variable with the uid of the pod of a tool service that claims sandboxes."""
INDEX_VARIABLE = "KESTRL_INDEX"
"""Environment variable with the ordinal of an engine agent's pod."""
FILE = "file://"
"""Prefix of an address that stands for every engine that a file lists, on one machine."""
DNS = "dns://"
"""Prefix of an address that stands for every address of its name: of a headless Service, one for each of its pods."""
Settings = TypeVar("Settings", bound="ServiceSettings")


class SettingsModel(BaseModel):
    """Base model: frozen, refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Read = TypeVar("Read", bound=SettingsModel)


def read_settings(kind: type[Read], path: Path) -> Read:
    """Reads a settings file.

    Raises:
        UserInputError: The file is missing or invalid for this version.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: not readable as {kind.__name__}: {error}") from error


class ServiceSettings(SettingsModel):
    """Settings of every service."""

    component: str
    """Name with ordinal, such as `rollout-0`."""
    job: str
    run: str
    listen: str
    """`host:port` of the gRPC server."""
    python_path: tuple[str, ...] = ()
    """Folders that are prepended to `sys.path`, with the user's tools, rewards and agents."""
    otlp_endpoint: str | None = None
    """OTLP endpoint for spans and metrics; the standard OTEL_* variables also work."""
    traced_groups: float = 0.1
    """Share of groups whose spans are recorded."""
    metrics_listen: str | None = None
    """`host:port` of the Prometheus endpoint."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. KESTRL_REPLICA, a pod's name on a cluster, identifies replicas that share one.

        Raises:
            UserInputError: The file is missing or invalid for this version.
        """
        settings = read_settings(cls, path)
        replica = os.environ.get(REPLICA_VARIABLE)
        role = settings.component.partition("-")[0]
        return settings.model_copy(update={"component": f"{role}-{replica}"}) if replica else settings


class DataSettings(SettingsModel):
    """A data set."""

    path: str
    size: int | None = None
    """Number of scenarios; None means all."""
    promptless: bool = False
    """Whether rows may have no prompt, since the environment gives it."""
    runner: str | None = None
    """The manifest's field of what runs the episodes of rows that name no loop, where that is none of the worker's
    loops: then rows may name those of `loops` alone."""
    loops: tuple[str, ...] = ()
    """Names of the manifest's loops."""
