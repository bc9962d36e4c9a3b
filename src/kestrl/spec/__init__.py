"""The manifest `AgentRLJob`. Pure: no access to files, processes or networks."""

from kestrl.spec.job import API_VERSION, KIND, AgentRLJob, JobSpec
from kestrl.spec.load import ProblemsError, parse_job, read_job, with_overrides
from kestrl.spec.problems import Problem
from kestrl.spec.schema import job_schema

__all__ = [
    "API_VERSION",
    "KIND",
    "AgentRLJob",
    "JobSpec",
    "Problem",
    "ProblemsError",
    "job_schema",
    "parse_job",
    "read_job",
    "with_overrides",
]
