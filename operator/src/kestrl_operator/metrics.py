"""The operator's metrics, read from its parts whenever they are exported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kestrl._shared.telemetry.metrics import measured, observe
from kestrl._shared.telemetry.names import Metric
from kestrl_operator import job_metrics
from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.leader_election import LeaderElection
from kestrl_operator.controllers.controller import Controller
from kestrl_operator.controllers.installations import Installations
from kestrl_operator.controllers.job_state import JobStates
from kestrl_operator.state.store import Store
from kestrl_operator.watch.audit import Audit


def register(
    api: Api,
    election: LeaderElection,
    audit: Audit,
    controllers: Sequence[Controller],
    passes: Counter[str],
    states: JobStates,
    jobs: Store,
    installations: Installations,
) -> None:
    """Registers what is exported of each part."""
    loop = asyncio.get_running_loop()
    observe(Metric.RECONCILES, lambda: passes)
    observe(Metric.OPERATOR_QUEUE, lambda: sum(len(controller.queue) for controller in controllers))
    observe(Metric.OPERATOR_LEADER, lambda: int(election.leading))
    observe(Metric.OPERATOR_REQUESTS, lambda: api.requests)
    observe(Metric.OPERATOR_FOLLOWED, lambda: states.followed)
    observe(Metric.WATCH_AGE, lambda: loop.time() - audit.ended)
    observe(Metric.OPERATOR_STALE_WATCH, lambda: len(audit.stale))
    observe(Metric.OPERATOR_JOBS, lambda: phases(jobs))
    observe(Metric.JOB_INFO, lambda: job_metrics.info(jobs) if election.leading else {})
    observe(Metric.JOB_CONDITION, lambda: job_metrics.conditions(jobs) if election.leading else {})
    observe(Metric.JOB_DEVICES, lambda: job_metrics.devices(jobs) if election.leading else {})
    observe(Metric.OPERATOR_FOREIGN_JOBS, lambda: foreign(controllers, installations))


PASS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Upper bounds of the buckets of a pass's duration, in seconds."""


def pass_seconds() -> Callable[[float], None]:
    """The function that records the duration of a pass."""
    return measured(Metric.RECONCILE_SECONDS, PASS_BOUNDS)


def phases(store: Store) -> dict[str, int]:
    """The number of AgentRLJobs by phase."""
    jobs = list(store.jobs.values())
    return dict(Counter(job.get("status", {}).get("shown", {}).get("phase") or "New" for job in jobs))


def foreign(controllers: Sequence[Controller], installations: Installations) -> int:
    """The number of jobs that another installation reconciles."""
    jobs = [job for controller in controllers for job in list(controller.store.jobs.values())]
    return sum(installations.is_foreign(job) for job in jobs)
