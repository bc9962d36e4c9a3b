"""The tools of a server that are offered, and their names."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import EndpointEntry, HttpEntry, McpEntry, SecretText, ToolEntry
from kestrl.errors import UserInputError
from kestrl.tools import ToolSchema
from kestrl_tools.catalogue import load_tools
from kestrl_tools.servers import LeftOut, ListedTool, callable_name, definitions
from kestrl_tools.tool_threads import ToolThreads

SAMPLE = Path(__file__).with_name("mcp_sample.py")
GOOD: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}}
ODD: dict[str, Any] = {"type": "object", "properties": {"text": {"$ref": "http://127.0.0.1:1/a"}}}


def listed(**schemas: dict[str, Any]) -> list[ListedTool]:
    return [ListedTool(name, "Does it.", schema, name) for name, schema in schemas.items()]


def offered(tools: list[ListedTool], left_out: LeftOut) -> list[ToolSchema]:
    return [tool.schema for tool in definitions("mcp", "server", tools, None, left_out)]


def test_an_odd_tool_is_refused_by_its_name_and_with_the_fix() -> None:
    with pytest.raises(UserInputError, match=r"the tool odd cannot be offered: .*not into the document.*`exclude` or"):
        definitions("mcp", "server", listed(good=GOOD, odd=ODD), None)


def test_all_odd_tools_are_named_up_to_a_bound() -> None:
    tools = listed(**{f"odd{number}": ODD for number in range(9)})
    with pytest.raises(UserInputError, match=r"odd0.*odd4.*and 4 more"):
        definitions("mcp", "server", tools, None)


def test_an_odd_tool_is_left_out_where_the_manifest_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tools = listed(good=GOOD, odd=ODD)
    assert [tool.name for tool in offered(tools, LeftOut(excluded=frozenset({"odd"})))] == ["good"]
    with caplog.at_level(logging.WARNING):
        assert [tool.name for tool in offered(tools, LeftOut(unsupported=True))] == ["good"]
    assert "the tool odd cannot be offered" in caplog.text


def test_what_is_excluded_must_be_there() -> None:
    with pytest.raises(UserInputError, match=r"^exclude: server has no tool od \(it has: good\)"):
        offered(listed(good=GOOD), LeftOut(excluded=frozenset({"od"})))


@pytest.mark.parametrize(
    ("name", "mapped"),
    [("files.read", "files_read"), ("repos/get", "repos_get"), ("1st", "_1st"), ("", "_"), ("\ud800\x00", "_")],
)
def test_a_name_that_models_cannot_call_is_mapped(name: str, mapped: str) -> None:
    assert callable_name(name) == mapped


def test_two_tools_of_one_name_are_refused_by_it() -> None:
    tools = [ListedTool(callable_name(name), "", GOOD, name) for name in ("files.read", "files/read")]
    with pytest.raises(UserInputError, match="files_read cannot be offered: the server lists 2 tools"):
        definitions("mcp", "server", tools, None)


async def test_a_tool_is_called_by_the_servers_own_name(serve: Any, tmp_path: Path) -> None:
    """The sample server answers any name that it does not know with the text."""
    state = tmp_path / "state.json"
    tools = [{"name": "files.read", "inputSchema": GOOD}, {"name": "odd", "inputSchema": ODD}]
    state.write_text(json.dumps({"tools": [*tools, {"name": "pid", "inputSchema": GOOD}]}))
    server = McpEntry(command=(sys.executable, str(SAMPLE), str(state)))
    entry = ToolEntry(name="files", mcp=server, exclude=("pid",), unsupported="skip")
    async with serve(entry) as client:
        assert [tool.name for tool in await client.list()] == ["files_read"]
        session = await client.open("files_read")
        assert (await client.call(session, "files_read", {"text": "a"})).text == "a"
        assert (await client.call(session, "files_read", {"text": 5})).outcome == "schema_violation"


@pytest.mark.parametrize("value", ["canary-0123\n", "canary\r\nX-Other: 1", "canary-é", "canary-\udcff"])
@pytest.mark.parametrize("kind", ["http", "mcp"])
async def test_a_secret_that_no_header_holds_is_an_error_of_the_manifest(
    kind: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", value)
    secret = {"Authorization": SecretText(variable="KESTRL_TOOL_SECRET_0", prefix="Bearer ")}
    endpoint = EndpointEntry(name="t", description="d", method="GET", path="/a")
    entry = (
        ToolEntry(name="h", http=HttpEntry(base_url="http://127.0.0.1:9", endpoints=(endpoint,), secret_headers=secret))
        if kind == "http"
        else ToolEntry(name="m", mcp=McpEntry(url="http://127.0.0.1:9/mcp", secret_headers=secret))
    )
    with pytest.raises(UserInputError, match="KESTRL_TOOL_SECRET_0 has a line end") as caught:
        await load_tools([entry], ToolThreads())
    assert "canary" not in str(caught.value)
