"""Agents of other frameworks, unchanged, each in an environment of its own (`make agents`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "data" / "existing_agents.py"
ENVIRONMENTS = "KESTRL_CLIENT_ENVIRONMENTS"
NAMES = ("openai-agents", "pydantic-ai", "langgraph", "openai2", "openai3", "litellm", "smolagents")
CASES = (
    *("openai2", "openai2-stream", "openai3", "openai3-stream", "litellm"),
    *("langgraph", "langgraph-stream", "langgraph-responses", "langgraph-anthropic"),
    *("openai-agents", "openai-agents-stream", "openai-agents-chat", "openai-agents-chat-stream"),
    *("pydantic-ai", "pydantic-ai-stream", "pydantic-ai-responses", "pydantic-ai-anthropic"),
)
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(180),
    pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents"),
]


@asynccontextmanager
async def ready(case: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """An agent that has imported its framework and waits for an endpoint."""
    name = next(name for name in NAMES if case.startswith(name))
    process = await asyncio.create_subprocess_exec(
        Path(os.environ[ENVIRONMENTS]) / name / "bin" / "python",
        PROGRAM,
        case,
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"READY\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answer(process: asyncio.subprocess.Process, endpoint: Any) -> str:
    """What an agent answers in the end."""
    root = endpoint.base_url.removesuffix("/v1")
    variables = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": endpoint.api_key,
    }
    out, errors = await process.communicate(json.dumps(variables).encode() + b"\n")
    assert process.returncode == 0, errors.decode()[-3000:]
    return out.decode().rpartition("\nANSWER ")[2].rstrip("\n")


@pytest.mark.parametrize("case", CASES)
async def test_an_agent_makes_one_row(served: Any, call_text: Any, case: str) -> None:
    async with ready(case) as process, served(sampling={"max_tokens": 1000}) as (stage, endpoint, end):
        stage.says(call_text("count_stock", item="lämp", n=2), "There are 2.")
        assert await answer(process, endpoint) == "There are 2."
        episode = await end()
        assert episode.failure is None
        assert [turn.row for turn in episode.turns] == [0, 0]
        assert [name for name in episode.metrics if name.startswith("forks.")] == []
        assert "stock" in episode.messages[-2]["content"] or episode.messages[-2]["content"] == "2"


async def test_smolagents_writes_its_history_anew(served: Any, call_text: Any) -> None:
    """Each of its calls begins a row, with its reason: it sends turns back as text."""
    sizes = {"settings": {"context_length": 65_536}, "sampling": {"max_tokens": 2000}}
    async with ready("smolagents") as process, served(**sizes) as (stage, endpoint, end):
        calls = call_text("count_stock", item="lamp", n=2), call_text("count_stock", item="lamp")
        stage.says(*calls, call_text("final_answer", answer="There are 2."))
        assert await answer(process, endpoint) == "There are 2."
        episode = await end()
        assert episode.failure is None
        assert len(episode.rows) == len(episode.turns) == 3
        assert episode.metrics["forks.edited_assistant"] == 2
        assert episode.metrics["asked_not_forced.tool_choice"] == 3
        assert episode.metrics["rewrites_history"] == 1
