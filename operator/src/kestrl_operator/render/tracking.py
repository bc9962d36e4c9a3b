"""The pod that sends a run to MLflow: it holds the user's Secret for the server, and no credential of the job. Pure."""

from __future__ import annotations

from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.tracking import READY_FILE
from kestrl._shared.spec.job import JobSpec
from kestrl_operator.render.pods import from_secret

Object = dict[str, Any]
PROBE = {"exec": {"command": ["test", "-e", READY_FILE]}, "periodSeconds": 5, "timeoutSeconds": 5}


def with_tracking(template: Object, role: Role, spec: JobSpec) -> Object:
    """The pods of a role; those that send the run with the server's Secret, and ready while everything is sent."""
    tracking = spec.telemetry.mlflow
    if role is not Role.MLFLOW or tracking is None:
        return template
    secret = None if tracking.secret_ref is None else tracking.secret_ref.name
    containers = [
        {**container, "readinessProbe": PROBE, **from_secret(secret)} for container in template["spec"]["containers"]
    ]
    return {**template, "spec": {**template["spec"], "containers": containers}}


def strategy(role: Role) -> Object:
    """How a role's pods are replaced: two that send the same run would create it twice."""
    return {"strategy": {"type": "Recreate"}} if role is Role.MLFLOW else {}
