"""The environment of a job: its kinds, what it stands in place of, and what its interpreter has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kestrl._shared.plan.environments import environment_requirements, outside_environment
from kestrl._shared.spec import AgentRLJob, ProblemsError, parse_job
from kestrl._shared.spec.environments import Environment

if TYPE_CHECKING:
    from kestrl._shared.plan.site import Site


def job(**spec: Any) -> AgentRLJob:
    return parse_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "mine"},
            "spec": {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "rows.jsonl"}}, **spec},
        }
    )


GYM = {"reasoningGym": {"generator": "chain_sum"}}
WORDS: dict[str, Any] = {"verifiers": {"taskset": "word-tasks"}}


def test_its_own_reward_is_that_of_a_job_that_names_none() -> None:
    (reward,) = job(environment=GYM).spec.rewards
    assert (reward.rule, reward.weight) == ("environment_reward", 1.0)
    (named,) = job(environment=GYM, rewards=[{"rule": "format"}]).spec.rewards
    assert named.rule == "format"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"environment": {}}, "give `verifiers`, `trl`, `openenv`, `reasoningGym` or `adapter`, and one of"),
        ({"environment": {**GYM, "trl": {"use": "mine:Env"}}}, "and one of them only"),
        ({"environment": {"openenv": {}}}, "give `url` of a running server or `app` to start one"),
        ({"environment": GYM, "tools": [{"use": "mine:tool"}]}, "spec.tools: stand beside spec.environment"),
        ({"environment": GYM, "agent": {"loop": "single_turn"}}, "spec.agent.loop: single_turn plays no environment"),
        ({"environment": {**GYM, "python": {"version": "3.9"}}}, "spec.environment.python.version"),
        ({"environment": {**GYM, "python": {"requirements": ["-e ."]}}}, "spec.environment.python.requirements"),
        (
            {"environment": WORDS, "agent": {"loop": "mine:loop"}},
            "spec.agent.loop: an environment by verifiers runs its episodes itself; remove it",
        ),
        (
            {"environment": WORDS, "agent": {"loops": {"one": "single_turn"}}},
            "spec.agent.loops.one: an environment by verifiers runs its episodes itself",
        ),
        ({"environment": WORDS, "agent": {"run": "mine:agent"}}, "spec.environment: an agent by run brings its own"),
        ({"environment": {**WORDS, "memoryMb": 512}}, "spec.environment.memoryMb: bounds a process of one episode"),
        (
            {"environment": {"verifiers": {"taskset": "w", "config": {"agent": {"model": "gpt"}}}}},
            "spec.environment.verifiers.config.agent.model: the model that is trained plays",
        ),
        ({"environment": {"verifiers": {"taskset": "../w"}}}, "spec.environment.verifiers.taskset"),
        (
            {"environment": GYM, "rewards": [{"rule": "environment_reward", "config": {"weights": {"done": "1"}}}]},
            "spec.rewards[0].config.weights.done: must be a number",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        job(**spec)
    assert problem in str(caught.value)


def test_an_environment_that_runs_its_episodes_gets_the_jobs_limits_and_its_own_settings() -> None:
    config = {"agent": {"max_turns": 2, "timeout": {"scoring": 30}}, "taskset": {"words": ["lamp"]}}
    environment = {"verifiers": {"taskset": "word-tasks", "harness": "null", "config": config}, "sessions": 5}
    spec = job(
        environment=environment, agent={"maxTurns": 3, "maxTokens": 64}, rollout={"replicas": 2}, inference={}
    ).spec
    outside = outside_environment(spec, cast("Site", SimpleNamespace(environment_python="/venv/bin/python")), pods=None)
    assert outside is not None
    assert (outside.sessions, outside.python, outside.start_seconds) == (3, "/venv/bin/python", 600)
    assert outside.config == {
        "taskset": {"id": "word-tasks", "words": ["lamp"]},
        "agent": {
            "runtime": {"type": "subprocess"},
            "harness": {"id": "null"},
            "max_turns": 2,
            "max_output_tokens": 64,
            "max_total_tokens": 4096,
            "timeout": {"scoring": 30},
        },
    }
    stepped = job(environment=GYM).spec
    assert outside_environment(stepped, cast("Site", SimpleNamespace(environment_python=None)), pods=None) is None


def test_requirements_of_the_manifest_replace_those_of_the_adapter() -> None:
    own = Environment.model_validate({**GYM, "python": {"requirements": ["Reasoning_Gym==0.1.25", "pydantic<3"]}})
    requirements = environment_requirements(own)
    assert requirements[:2] == ("Reasoning_Gym==0.1.25", "pydantic<3")
    assert "reasoning-gym" not in requirements
    assert not [each for each in requirements[2:] if each.startswith("pydantic")]
    assert "reasoning-gym" in environment_requirements(Environment.model_validate(GYM))
