"""The operator's configuration: one file, rendered from the chart's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.safe_yaml import read as read_yaml
from kestrl.errors import UserInputError
from kestrl_operator.state.chart_values import Cluster, read_cluster

SHORTEST_KEY = 16


class _Given(SettingsModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, arbitrary_types_allowed=True
    )


class LeaseSettings(_Given):
    """Settings of the leader election."""

    name: str = "kestrl-operator"
    namespace: str
    seconds: float = 15.0


class OperatorConfig(_Given):
    """The operator's configuration."""

    jobs: Cluster
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty for all."""
    key_file: Path
    """File with a secret key, the same for all replicas. The jobs' credentials are derived from it."""
    lease: LeaseSettings
    health_listen: str = "0.0.0.0:8080"
    metrics_listen: str = "0.0.0.0:9464"
    otlp: str | None = None
    kueue: bool = False
    """Whether jobs that name a queue ask Kueue for quota by a Workload of their own."""
    work_file: Path | None = None
    """File with the job that is being processed, in a volume that outlives the container; see `work_record`."""
    workers: int = 8
    audit_seconds: float = 60.0
    """Seconds between two comparisons of the watch streams with lists; see `audit`."""

    def key(self) -> bytes:
        """The secret key.

        Raises:
            UserInputError: The file cannot be read, or is too short.
        """
        try:
            key = self.key_file.read_bytes().strip()
        except OSError as error:
            raise UserInputError(f"keyFile: {self.key_file}: {error.strerror}") from error
        if len(key) < SHORTEST_KEY:
            raise UserInputError(
                f"keyFile: {self.key_file} holds {len(key)} bytes; at least {SHORTEST_KEY} are required"
            )
        return key


def read_config(path: Path) -> OperatorConfig:
    """Reads the configuration file.

    Raises:
        UserInputError: It is invalid; the message names the field.
    """
    try:
        document: Any = read_yaml(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserInputError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise UserInputError(f"{path}: must be a map")
    content = cast("dict[str, Any]", document)
    jobs = read_cluster(content.get("jobs") or {})
    try:
        return OperatorConfig.model_validate({**content, "jobs": jobs})
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserInputError(f"{path}: {details}") from error
