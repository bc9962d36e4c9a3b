"""What the operator is told when it starts: one file, made from the chart's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from kestrl.errors import UserInputError
from kestrl.plan.settings import Model
from kestrl_operator.cluster import Cluster, read_cluster

SHORTEST_KEY = 16


class _Given(Model):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, arbitrary_types_allowed=True
    )


class LeaseSettings(_Given):
    """The election."""

    name: str = "kestrl-operator"
    namespace: str
    seconds: float = 15.0


class Config(_Given):
    """All of it."""

    jobs: Cluster
    namespaces: tuple[str, ...] = ()
    """Watched; none means all."""
    key_file: Path
    """Any bytes, the same for all replicas: the jobs' credentials are derived from them."""
    lease: LeaseSettings
    health_listen: str = "0.0.0.0:8080"
    metrics_listen: str = "0.0.0.0:9464"
    otlp: str | None = None
    work_file: Path | None = None
    """Where the job that is being handled is named, in a volume that outlives the container; see `at_work`."""
    workers: int = 8
    audit_seconds: float = 60.0
    """How often the watch streams are compared with lists; see `audit`."""

    def key(self) -> bytes:
        """The key.

        Raises:
            UserInputError: It cannot be read, or is too short to be one.
        """
        try:
            key = self.key_file.read_bytes().strip()
        except OSError as error:
            raise UserInputError(f"keyFile: {self.key_file}: {error.strerror}") from error
        if len(key) < SHORTEST_KEY:
            raise UserInputError(f"keyFile: {self.key_file} holds {len(key)} bytes; {SHORTEST_KEY} are the least")
        return key


def read_config(path: Path) -> Config:
    """Reads the file.

    Raises:
        UserInputError: It is not what this operator expects; the message names the field.
    """
    try:
        given: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserInputError(f"{path}: {error}") from error
    if not isinstance(given, dict):
        raise UserInputError(f"{path}: must be a map")
    content = cast("dict[str, Any]", given)
    jobs = read_cluster(content.get("jobs") or {})
    try:
        return Config.model_validate({**content, "jobs": jobs})
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserInputError(f"{path}: {told}") from error
