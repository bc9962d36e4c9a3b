"""The manifest `AgentRLJob`. Pure: no access to files, processes or networks."""

from kestrl._shared.spec.job import API_VERSION, KIND, AgentRLJob, JobSpec, job_schema
from kestrl._shared.spec.load import parse_job, read_job, with_overrides
from kestrl._shared.spec.problems import Problem, ProblemsError

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
