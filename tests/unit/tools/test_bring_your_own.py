"""The example that the README shows: as short as it says, and all its parts fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.starters.writing import write_starter
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.spec import read_job
from kestrl.data.rows import load_scenarios
from kestrl.episode import CallOutcome, Episode, StopReason, ToolCall, Turn
from kestrl.rewards import Attempt
from kestrl.rewards.checking import as_score
from kestrl.rewards.resolving import resolve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `kestrl new` writes, importable as from beside its manifest."""
    write_starter("tool", tmp_path / "starter")
    monkeypatch.syspath_prepend(str(tmp_path / "starter"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path / "starter"


def test_it_is_forty_lines_of_python_and_ten_rows(folder: Path) -> None:
    source = (folder / "mine.py").read_text()
    assert len(source.splitlines()) <= 40
    assert "class " not in source
    assert len(load_scenarios(folder / "data.jsonl")) == 10


async def test_its_tool_answers_every_row_and_its_reward_sees_that(serve: Any, folder: Path) -> None:
    spec = read_job(folder / "job.yaml").spec
    tools = [ToolEntry(name=tool.name, use=tool.use, config=tool.config) for tool in spec.tools]
    reward = resolve(str(spec.rewards[0].rule), field="rewards[0].rule")
    async with serve(*tools) as client:
        session = await client.open()
        for scenario in load_scenarios(folder / "data.jsonl"):
            item = scenario.id.removeprefix("stock-")
            answer = await client.call(session, spec.tools[0].name, {"item": item})
            assert answer.text == f'{{"{item}": {scenario.ground_truth}}}'
            right = attempt(f"There are {scenario.ground_truth}.", answer.text)
            wrong = attempt("There are 999.", answer.text)
            scores = [
                as_score("found_it", reward(Attempt(scenario=scenario, episode=episode, max_turns=3))).value
                for episode in (right, wrong, replace(right, tool_calls=[]))
            ]
            assert scores == [1.2, 0.2, 1.0]


def attempt(text: str, observed: str) -> Episode:
    call = ToolCall(turn=0, name="count_stock", raw="", arguments={}, outcome=CallOutcome.OK, text=observed)
    turn = Turn(
        index=0, row=0, start=0, end=0, text=text, finish_reason="stop", engine="engine-0", policy="base", seconds=0.1
    )
    return Episode(
        id="e",
        group_id="g",
        scenario_id="s",
        index=0,
        seed=0,
        rows=[],
        turns=[turn],
        tool_calls=[call],
        messages=[],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=None,
        engine="engine-0",
        started_at=0.0,
        seconds=0.0,
    )


VERL_TOOLS = """
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "count",
                    "description": "Counts.",
                    "parameters": {
                        "type": "object",
                        "properties": {"by": {"type": "integer", "minimum": 1}},
                        "required": ["by"],
                    },
                },
            }
        )

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id, **kwargs)
        self.counts[instance_id] = kwargs["create_kwargs"]["start"]
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.counts[instance_id] += parameters["by"]
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {"by": parameters["by"]}


@function_tool("web_search")
def search(query: str, limit: int = 1):
    '''Searches the web.

    Args:
        query: What for.
        limit: How many.
    '''
    return ToolResponse(text=query * limit), 0.25, {"limit": limit}
"""


async def test_tools_that_subclass_verls_base_run_without_verl(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kestrl._shared.plan.settings.tools import ToolEntry
    from kestrl_tools.catalogue import load_tools
    from kestrl_tools.execution import answer_of
    from kestrl_tools.tool_threads import ToolThreads

    (tmp_path / "verl_tools_of_mine.py").write_text(VERL_TOOLS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        tools = await load_tools(
            [
                ToolEntry(name="count", use="verl_tools_of_mine:Counter", config={}),
                ToolEntry(name="search", use="verl_tools_of_mine:search", config={}),
            ],
            ToolThreads(),
        )
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("verl", "verl_tools_of_mine"):
                del sys.modules[name]
    assert tools["count"].schema.parameters["properties"] == {"by": {"type": "integer", "minimum": 1}}
    counter = await tools["count"].provider.open({"start": 40})
    answer = answer_of("count", await counter.call("count", {"by": 2}, {}))
    assert (answer.text, answer.data_json) == ("42", '{"tool_reward": 0.5, "tool_metrics": {"by": 2}}')
    await counter.close()
    function = await tools["search"].provider.open({})
    answer = answer_of("search", await function.call("search", {"query": "a", "limit": 3}, {}))
    assert (answer.text, answer.data_json) == ("aaa", '{"tool_reward": 0.25, "tool_metrics": {"limit": 3}}')
    await function.close()
