"""What sends a run to an experiment tracker from a pod beside it. Pure."""

from __future__ import annotations

from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.tracking import TrackingSettings
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.job import AgentRLJob, JobSpec

MODULE = "kestrl._app.push.pod"
READY_FILE = "/tmp/sent"  # noqa: S108 - a volume of the pod


def followers(job: AgentRLJob, site: Site) -> tuple[Component, ...]:
    """What sends the run to the job's MLflow server, where components are pods. On one machine `kestrl run` does."""
    tracking = job.spec.telemetry.mlflow
    if tracking is None or not site.templates:
        return ()
    settings = TrackingSettings(
        job=job.metadata.name,
        run=site.run,
        storage=site.storage,
        settings=job.spec.model_dump(mode="json", by_alias=True),
        uri=tracking.uri,
        experiment=tracking.experiment,
        sample=tracking.sample,
        ready_file=READY_FILE,
    )
    return (Component(name=f"{Role.MLFLOW}-0", role=Role.MLFLOW, module=MODULE, settings=settings, env_defaults={}),)


def tracking_servers(spec: JobSpec) -> tuple[RemoteServer, ...]:
    """The server that a run is sent to."""
    tracking = spec.telemetry.mlflow
    return () if tracking is None else (server_at(tracking.uri, "spec.telemetry.mlflow.uri"),)
