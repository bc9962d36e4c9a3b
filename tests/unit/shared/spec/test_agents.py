"""The manifest's agent outside of the worker: what contradicts itself, and how it is shown."""

from __future__ import annotations

import pytest

from kestrl._shared.plan.agents import outside_line
from kestrl._shared.spec import parse_job, with_overrides

from .test_job import MANIFEST, refused

NO_TOOLS = "tools=[]"


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        ("{run: 'mine:agent', config: {depth: 2}, env: {LEVEL: debug}}", "mine:agent, in a process beside each worker"),
        (
            "{run: 'mine:agent', python: {requirements: ['openai>=3', httpx]}}",
            "mine:agent, in a process beside each worker with openai>=3, httpx",
        ),
        ("{command: [node, agent.js]}", "node agent.js, a process for each episode"),
        (
            "{command: [node, agent.js], image: 'r/mine:3'}",
            "node agent.js, a process for each episode; on a cluster in pods of r/mine:3",
        ),
        ("{url: 'http://agent:8080/run'}", "http://agent:8080/run, a POST for each episode"),
        ("{loop: single_turn}", ""),
    ],
)
def test_an_agent_is_one_of_four(agent: str, line: str) -> None:
    job = parse_job(with_overrides(MANIFEST, [NO_TOOLS, f"agent={agent}"]))
    assert outside_line(job.spec.agent) == line


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("{run: 'mine:agent', url: 'http://agent/'}", "spec.agent.url: one job has one agent: keep one of run, url"),
        ("{run: 'mine:agent', loop: single_turn}", "spec.agent.loop: one job has one agent: keep one of run, loop"),
        ("{stops: {Own: agent_limit}}", "spec.agent.stops: belongs to an agent by run or command or url; remove it"),
        ("{url: 'http://agent/', env: {A: b}}", "spec.agent.env: belongs to an agent by run or command; remove it"),
        (
            "{command: [agent], python: {requirements: [openai]}}",
            "spec.agent.python: belongs to an agent by run; remove it",
        ),
        ("{command: [agent], env: {OPENAI_API_KEY: b}}", "spec.agent.env.OPENAI_API_KEY: is set for every episode"),
        ("{url: 'agent:8080'}", "spec.agent.url"),
        ("{url: 'http://agent/', image: mine}", "spec.agent.image: belongs to an agent by run or command; remove it"),
        ("{command: [agent], image: 'a b'}", "spec.agent.image"),
        ("{command: [agent], replicas: 2}", "spec.agent.replicas: belongs to the pods of agent.image; give it, or"),
        ("{command: [agent], runtimeClassName: gvisor}", "spec.agent.runtimeClassName: belongs to the pods of"),
        ("{command: [agent], image: mine, replicas: 1001}", "spec.agent.replicas"),
        ("{run: 'mine'}", "spec.agent.run"),
        ("{run: 'mine:agent', stops: {'a b': agent_limit}}", "spec.agent.stops"),
        ("{run: 'mine:agent', stops: {Own: answered}}", "spec.agent.stops.Own"),
    ],
)
def test_what_contradicts_itself_is_named_with_its_field(agent: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in refused(NO_TOOLS, f"agent={agent}"))


def test_an_agent_outside_may_have_the_jobs_tools() -> None:
    assert parse_job(with_overrides(MANIFEST, ["agent={command: [agent]}"])).spec.tools


def test_an_episode_of_several_rows_may_sample_more_than_its_context() -> None:
    limits = ["inference.contextLength=1024", "agent.maxTokens=5000"]
    assert any(line.startswith("spec.agent.maxTokens: ") for line in refused(*limits))
    parse_job(with_overrides(MANIFEST, [*limits, "agent.loop=compacting_agent"]))
    parse_job(with_overrides(MANIFEST, [*limits, "agent.command=[agent]"]))


def test_a_budget_beyond_the_context_is_refused() -> None:
    (problem,) = refused(
        "inference.contextLength=1024", "agent={loop: compacting_agent, config: {at: 1024}, maxTokens: 9}"
    )
    assert problem.startswith("spec.agent.config.at: 1024 leaves no room for a summary in inference.contextLength")
    (other,) = refused("agent={loop: tool_agent, config: {at: 10}}")
    assert other.startswith("spec.agent.config: tool_agent takes no config")


def test_a_returned_reward_needs_the_worth_of_a_run_that_was_stopped() -> None:
    reward = "rewards=[{rule: loop_reward}]"
    (problem,) = refused(NO_TOOLS, "agent={run: 'mine:agent'}", reward)
    assert problem.startswith("spec.agent.stoppedReward: ")
    parse_job(with_overrides(MANIFEST, [NO_TOOLS, "agent={run: 'mine:agent', stoppedReward: 0}", reward]))


def test_an_environment_that_an_agent_outside_never_plays_is_refused() -> None:
    environment = "environment={reasoningGym: {generator: chain_sum}}"
    assert "spec.environment: an agent by command brings its own task and steps; remove one of the two" in refused(
        NO_TOOLS, "agent={command: [agent]}", environment
    )
    parse_job(with_overrides(MANIFEST, [NO_TOOLS, environment]))
