"""The components of `kestrl bench`: the job's tools and judge, and a program in the learner's place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.shared.plan.test_plan import SITE, job_with

from kestrl._shared.plan.bench import MODULE, bench_components
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.evaluation import evaluation_sampling
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.settings.bench import BenchEndpoint, BenchSettings
from kestrl.errors import UserInputError

ENDPOINT = BenchEndpoint(url="http://h:1/v1", key_variable="KEY")


def test_a_bench_has_tools_and_judge_and_a_program_in_the_learners_place() -> None:
    job = job_with("agent.maxTokens=100")
    components = bench_components(plan(job, SITE), job, SITE, ENDPOINT, evaluation_sampling(job.spec))
    assert [component.role for component in components] == [Role.TOOLS, Role.JUDGE, Role.LEARNER]
    program = components[-1]
    assert program.module == MODULE
    assert isinstance(program.settings, BenchSettings)
    assert (program.settings.data.path, program.settings.data.promptless) == ("/data/validation.jsonl", False)
    assert program.settings.max_tokens_per_turn == 100


def test_a_bench_needs_validation_data() -> None:
    job = job_with("data.validation=null")
    for site, described in ((SITE, job), (replace(SITE, validation=None), job_with())):
        with pytest.raises(UserInputError, match="bench needs validation data"):
            bench_components(plan(described, site), described, site, ENDPOINT, evaluation_sampling(described.spec))
