"""Settings of what sends a run to MLflow, in a pod beside it."""

from __future__ import annotations

from typing import Any

from kestrl._shared.plan.settings.common import SettingsModel


class TrackingSettings(SettingsModel):
    """A run and the server that receives it."""

    job: str
    run: str
    storage: str
    """Address of the run's folder in object storage."""
    settings: dict[str, Any]
    """The manifest's `spec`, whose fields are parameters of the run."""
    uri: str
    """Address of the server."""
    experiment: str
    """Name of the experiment; empty for that of the job."""
    sample: float
    """Share of groups whose episodes are sent."""
    ready_file: str
    """File that exists while the server has received all that is stored."""
