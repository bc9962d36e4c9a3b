"""An agent outside of the worker calls the job's tools by the URL that it gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kestrl.api.tools.v1 import tools_pb2

CALL_TOOL = """
def call_tool(url, key, name, **arguments):
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(message).encode(), headers)) as answer:
        return json.load(answer)["result"]["content"][0]["text"]
"""
PROGRAM = f"""{CALL_TOOL}
shown = call_tool(os.environ["KESTRL_MCP_URL"], os.environ["KESTRL_API_KEY"], "search", word=said)
assert request["mcp_url"] == os.environ["KESTRL_MCP_URL"]
print(json.dumps({{"info": {{"shown": shown}}}}))
"""
FUNCTION = f"""
{CALL_TOOL}

def agent(row, base_url, key, deadline, depth, *, mcp_url):
    said = chat(base_url, key, row["messages"])
    return {{"info": {{"shown": call_tool(mcp_url, key, "search", word=said), "depth": depth}}}}
"""


def check(stage: Any, episode: Any) -> None:
    assert episode.failure is None
    assert episode.info["shown"] == "found kestrel"
    (call,) = episode.tool_calls
    assert (call.name, call.arguments, call.data) == ("search", {"word": "kestrel"}, {"rank": 1})
    assert [each.name for each in stage.tools.calls] == ["search"]
    opening = stage.tools.opened[stage.tools.calls[0].session_id]
    assert json.loads(opening.tools_kwargs_json) == {"search": {"create_kwargs": {"inbox": "a"}}}


def answer(arguments: dict[str, Any]) -> tools_pb2.CallResponse:
    return tools_pb2.CallResponse(outcome="ok", text=f"found {arguments['word']}", data_json='{"rank": 1}')


PAGE = Path(__file__).parents[4] / "docs" / "existing-agents.md"


async def test_the_pages_agent_calls_them(function_stage: Any, call_text: Any) -> None:
    (source,) = re.findall(r"`searching\.py`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    stage = await function_stage(source)
    stage.tools.handlers["search"] = answer
    stage.says(call_text("search", word="kestrel"), "A falcon.")
    episode = await stage.episode()
    assert episode.failure is None
    assert [(call.name, call.text, call.data) for call in episode.tool_calls] == [
        ("search", "found kestrel", {"rank": 1})
    ]
    assert [turn.row for turn in episode.turns] == [0, 0]


async def test_a_program_finds_the_tools_by_a_variable(program_stage: Any) -> None:
    stage = await program_stage(PROGRAM)
    stage.tools.handlers["search"] = answer
    stage.says("kestrel")
    check(stage, await stage.episode())


async def test_a_function_with_such_a_parameter_gets_the_url(function_stage: Any) -> None:
    stage = await function_stage(FUNCTION, config={"depth": 2})
    stage.tools.handlers["search"] = answer
    stage.says("kestrel")
    episode = await stage.episode()
    check(stage, episode)
    assert episode.info["depth"] == 2
