"""The plan's part of what runs episodes outside of the worker, and of an environment that workers step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.unit.shared.plan.test_plan import SITE
from tests.unit.shared.spec.test_environments import GYM, WORDS, job

from kestrl._shared.plan.agents import gateway_listen, outside_agent, pods_image, pods_replicas, serves_pods
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.environments import environment_entry
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.plan.tools import runtime_class
from kestrl._shared.spec.environments import Environment

if TYPE_CHECKING:
    from kestrl._shared.plan.site import Site

AGENT_PODS: dict[str, Any] = {"run": "mine:agent", "image": "mine/agent:1", "replicas": 3}


@pytest.mark.parametrize(
    ("spec", "image", "replicas"),
    [
        ({"agent": AGENT_PODS, "rewards": [{"rule": "format"}]}, "mine/agent:1", 3),
        ({"environment": {**WORDS, "image": "mine/words:1", "replicas": 4}}, "mine/words:1", 4),
        ({"environment": GYM}, None, 1),
    ],
)
def test_pods_are_of_the_agent_or_of_an_environment_that_runs_its_episodes(
    spec: dict[str, Any], image: str | None, replicas: int
) -> None:
    assert (pods_image(job(**spec).spec), pods_replicas(job(**spec).spec)) == (image, replicas)


@pytest.mark.parametrize(
    ("agent", "templates", "expected"),
    [
        ({"url": "http://h:1/run"}, True, True),
        ({"url": "http://h:1/run"}, False, False),
        (AGENT_PODS, True, True),
        ({"run": "mine:agent"}, True, False),
    ],
)
def test_episodes_are_served_to_other_pods_where_the_agent_is_one(
    agent: dict[str, Any], templates: bool, expected: bool
) -> None:
    spec = job(agent=agent, rewards=[{"rule": "format"}]).spec
    site = cast("Site", SimpleNamespace(templates=templates))
    assert serves_pods(spec, site) is expected
    assert gateway_listen(spec, site).startswith("0.0.0.0:" if expected else "127.0.0.1:")


@pytest.mark.parametrize(
    ("environment", "use", "config", "acts"),
    [
        ({"trl": {"use": "mine:Env"}}, "mine:Env", {}, False),
        ({"adapter": {"use": "mine:Adapter", "config": {"level": 2}}}, "mine:Adapter", {"level": 2}, True),
        (GYM, None, {"generator": "chain_sum", "settings": {}}, True),
        ({"openenv": {"url": "http://h:1"}}, None, {"url": "http://h:1", "app": None}, True),
    ],
)
def test_each_kind_of_environment_has_its_class_and_arguments(
    environment: dict[str, Any], use: str | None, config: dict[str, Any], acts: bool
) -> None:
    entry = environment_entry(Environment.model_validate(environment), None, episodes=7, deadline=10)
    assert entry.environment is not None
    assert entry.use is not None
    assert entry.use.startswith("kestrl_tools." if use is None else use)
    assert (entry.config, entry.environment.acts, entry.environment.sessions) == (config, acts, 7)


@pytest.mark.parametrize(
    ("spec", "promptless"), [({"environment": GYM}, True), ({"rewards": [{"rule": "format"}]}, False)]
)
def test_rows_of_a_job_with_an_environment_need_no_prompt(spec: dict[str, Any], promptless: bool) -> None:
    planned = job(**spec)
    (learner,) = (component for component in plan(planned, SITE) if component.role is Role.LEARNER)
    assert isinstance(learner.settings, LearnerSettings)
    assert learner.settings.data.promptless is promptless


@pytest.mark.parametrize(("environment", "role"), [(WORDS, Role.AGENT), (GYM, Role.TOOLS)])
def test_the_runtime_class_of_an_environment_is_that_of_the_pods_that_play_it(
    environment: dict[str, Any], role: Role
) -> None:
    spec = job(environment={**environment, "image": "mine:1", "runtimeClassName": "gvisor"}).spec
    classes = {other: runtime_class(spec, other) for other in (Role.AGENT, Role.TOOLS)}
    assert {other for other, named in classes.items() if named is not None} == {role}
    assert classes[role] == ("gvisor", "spec.environment.runtimeClassName")


@pytest.mark.parametrize(
    ("agent", "python"),
    [({"run": "mine:agent"}, "/venv/python"), ({"command": ["node"]}, None), ({"url": "http://h:1/run"}, None)],
)
def test_only_a_function_runs_in_the_interpreter_of_the_agent(agent: dict[str, Any], python: str | None) -> None:
    site = cast("Site", SimpleNamespace(templates=False, agent_python="/venv/python"))
    outside = outside_agent(job(agent=agent, rewards=[{"rule": "format"}]).spec, site)
    assert outside is not None
    assert (outside.python, outside.pods) == (python, None)
    assert outside_agent(job(rewards=[{"rule": "format"}]).spec, site) is None
