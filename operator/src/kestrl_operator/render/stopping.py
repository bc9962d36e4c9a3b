"""How pods end: the time that they have after SIGTERM, and what drains an engine before it gets one."""

from __future__ import annotations

from math import ceil
from typing import Any

from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import DRAIN_MODULE, engine_stop_seconds
from kestrl._shared.spec.job import JobSpec

GRACE_SECONDS = {Role.ROLLOUT: 90, Role.AGENT: 90, Role.MLFLOW: 90}
"""Seconds between SIGTERM and SIGKILL, longer than a drain takes, or sending the rest of a run; 30 for the others,
Kubernetes' default. A job says how long its learner has, and by the deadline of a turn how long its engines have."""


def grace_seconds(spec: JobSpec, role: Role) -> int:
    """Seconds between SIGTERM and SIGKILL of a role's pods."""
    if role is Role.LEARNER:
        return ceil(spec.learner.termination_grace)
    return ceil(engine_stop_seconds(spec)) if role is Role.INFERENCE else GRACE_SECONDS.get(role, 30)


def with_drain(container: dict[str, Any], component: Component, spec: JobSpec) -> dict[str, Any]:
    """A container whose engine gets its SIGTERM when no turn runs on it; any other container is as it was."""
    if component.role is not Role.ENGINE:
        return container
    limit = f"{spec.rollout.deadlines.turn:g}"
    command = [component.python or "python", "-m", DRAIN_MODULE, str(component.ports["http"]), limit]
    return {**container, "lifecycle": {"preStop": {"exec": {"command": command}}}}
