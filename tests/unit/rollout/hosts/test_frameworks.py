"""Agents of other frameworks in the process of `agent.run`, each in an environment of its own (`make agents`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[3] / "data"
ENVIRONMENTS = "KESTRL_CLIENT_ENVIRONMENTS"
CASES = [
    ("langgraph", "langgraph", "agent_limit", "GraphRecursionError"),
    ("openai-agents", "openai_agents", "agent_limit", "MaxTurnsExceeded"),
    ("pydantic-ai", "pydantic_ai", "agent_limit", "UsageLimitExceeded"),
    ("openai-agents", "openai_agents", "model_behavior", "ModelBehaviorError"),
    ("pydantic-ai", "pydantic_ai_behavior", "model_behavior", "UnexpectedModelBehavior"),
]
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(180),
    pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents"),
]


def interpreter(environment: str) -> str:
    return str(Path(os.environ[ENVIRONMENTS]).absolute() / environment / "bin" / "python")


async def stage_of(make_stage: Any, environment: str, function: str) -> Any:
    return await make_stage(
        outside={
            "run": f"framework_runs:{function}",
            "python": interpreter(environment),
            "stopped_reward": 0.0,
        },
        python_path=(str(DATA),),
    )


@pytest.mark.parametrize(("environment", "function"), [case[:2] for case in CASES[:3]])
async def test_a_frameworks_agent_runs_episodes(
    make_stage: Any, call_text: Any, environment: str, function: str
) -> None:
    stage = await stage_of(make_stage, environment, function)
    stage.says(call_text("count_stock", item="lamp"), "There are 2.")
    for episode in (await stage.run(size=2, sampling={"max_tokens": 1000})).episodes:
        assert episode.failure is None
        assert episode.info["answer"] == "There are 2."
        assert [turn.row for turn in episode.turns] == [0, 0]


@pytest.mark.parametrize(("environment", "function", "reason", "name"), CASES)
async def test_its_limit_and_the_models_mistake_are_scored(
    make_stage: Any, call_text: Any, environment: str, function: str, reason: str, name: str
) -> None:
    stage = await stage_of(make_stage, environment, function)
    turns = {
        "ModelBehaviorError": call_text("no_such_tool", item="lamp"),
        "UnexpectedModelBehavior": "No number.",
    }
    stage.says(turns.get(name, call_text("count_stock", item="lamp")))
    episode = await stage.episode(sampling={"max_tokens": 1000})
    assert (episode.failure, episode.stop_reason, episode.loop_reward) == (None, reason, 0.0)
    assert episode.metrics[f"stopped_by.{name}"] == 1.0
