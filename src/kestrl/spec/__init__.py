"""`AgentRLJob`: the one object a person writes. Pure: nothing here touches a file, a process or a network."""

from kestrl.spec.job import API_VERSION, KIND, AgentRLJob, JobSpec
from kestrl.spec.load import ProblemsError, parse_job, read_job, with_overrides
from kestrl.spec.rules import Problem
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
