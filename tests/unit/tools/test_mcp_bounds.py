"""What an MCP server sends is bounded, over HTTP also after decompression; what cannot be read is typed."""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from kestrl._shared.bounded_answers import MAX_MESSAGE, AnswerTooLong, bound
from kestrl._shared.plan.settings.tools import McpEntry, ToolEntry
from kestrl.data.values import MAX_VALUES
from kestrl.errors import KestrlError, UserInputError
from kestrl.tools.provider import NO_KWARGS
from kestrl_tools.catalogue import load_tools, providers_of, stop_all
from kestrl_tools.mcp.bounds import BURST, Flood
from kestrl_tools.tool_threads import ToolThreads

SERVER = """
import json, sys
how = sys.argv[1]
def send(text): sys.stdout.write(text + "\\n"); sys.stdout.flush()
for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message["method"]
    def answer(result): send('{"jsonrpc":"2.0","id":%d,"result":%s}' % (number, result))
    if method == "initialize":
        answer(json.dumps({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                           "serverInfo": {"name": "s", "version": "1"}}))
    elif method == "tools/list" and how == "pages":
        answer('{"tools":[],"nextCursor":"again"}')
    elif method == "tools/list":
        text = "\\\\ud800" if how == "description" else "d"
        answer('{"tools":[{"name":"t","description":"%s","inputSchema":{"type":"object"}}]}' % text)
    elif method == "tools/call" and how == "flood":
        for _ in range(5000):
            send('{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}')
    elif method == "tools/call":
        value = {"surrogate": '"\\\\ud800"', "deep": "[" * 50000 + "]" * 50000, "digits": "9" * 6000,
                 "values": "[" + "[]," * 1_100_000 + "1]"}[how]
        answer('{"content":[],"structuredContent":{"a":%s}}' % value)
"""


def entry(folder: Path, how: str) -> ToolEntry:
    program = folder / "server.py"
    program.write_text(SERVER)
    return ToolEntry(name="s", mcp=McpEntry(command=(sys.executable, str(program), how)))


@pytest.mark.parametrize(("how", "reason"), [("pages", "does not end"), ("description", "tools is invalid")])
async def test_a_list_that_cannot_be_read_is_refused_at_once(tmp_path: Path, how: str, reason: str) -> None:
    with pytest.raises(UserInputError, match=reason):
        await load_tools([entry(tmp_path, how)], ToolThreads())


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("surrogate", "tool_result_invalid"),
        ("deep", "tool_result_invalid"),
        ("values", "tool_result_invalid"),
        ("flood", "tool_server_unavailable"),
    ],
)
async def test_what_is_no_answer_is_typed_at_once(tmp_path: Path, how: str, code: str) -> None:
    tools = await load_tools([entry(tmp_path, how)], ToolThreads())
    (provider,) = providers_of(tools)
    try:
        session = await provider.open(NO_KWARGS)
        with pytest.raises(KestrlError) as caught:
            await session.call("t", {}, {})
    finally:
        await stop_all([provider])
    assert caught.value.code == code


class Sent(httpx2.AsyncByteStream):
    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part


async def read(body: Sent, **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx2.Response(200, headers=names, stream=body, request=httpx2.Request("POST", "http://s/mcp"))
    await bound(response)
    return await response.aread()


def zipped(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(b"x" * size) + packer.flush()


async def test_an_answer_is_bounded_before_and_after_decompression() -> None:
    assert await read(Sent(b"ab", b"c"), content_type="application/json") == b"abc"
    assert await read(Sent(zipped(100_000)), content_encoding="gzip") == b"x" * 100_000
    for body, encoding in ((Sent(zipped(MAX_MESSAGE + 1)), "gzip"), (Sent(*[b"x" * 1_000_000] * 17), "identity")):
        with pytest.raises(AnswerTooLong, match="longer than"):
            await read(body, content_encoding=encoding)
    for body, encoding in ((Sent(b"no gzip"), "gzip"), (Sent(b"x"), "br"), (Sent(b"x"), "gzip, gzip")):
        with pytest.raises(AnswerTooLong):
            await read(body, content_encoding=encoding)


VALUES = b'{"a":[' + b"[]," * (MAX_VALUES + 1) + b"1]}"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_the_values_of_an_answer_are_bounded_before_it_is_parsed(kind: str) -> None:
    """Megabytes of empty lists are hundreds of megabytes of objects."""
    body = b"data: " + VALUES + b"\n\n"
    with pytest.raises(AnswerTooLong, match="more than 1000000 values"):
        await read(Sent(body[:1000], body[1000:]), content_type=kind)
    texts = b'data: "' + b"," * (MAX_VALUES + 1) + b'"\n\n'
    assert await read(Sent(texts), content_type=kind) == texts


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_events_are_passed_on_as_each_is_complete(end: bytes) -> None:
    response = httpx2.Response(
        200,
        headers={"content-type": "text/event-stream"},
        stream=Sent(b"data: 1" + end[:1], end[1:], b"data: 2" + end + b"data: 3", end, b": rest"),
        request=httpx2.Request("POST", "http://s/mcp"),
    )
    await bound(response)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    passed = [part async for part in response.stream]
    assert passed == [b"data: 1" + end, b"data: 2" + end, b"data: 3" + end, b": rest"]


async def test_an_event_without_an_end_is_bounded() -> None:
    with pytest.raises(AnswerTooLong, match="longer than"):
        await read(Sent(*[b"data: 1\n\n", *[b"x" * 1_000_000] * 17]), content_type="text/event-stream")
    many = Sent(*[b"data: " + b"x" * 1_000_000 + b"\n\n"] * 17)
    assert len(await read(many, content_type="text/event-stream")) > MAX_MESSAGE


def test_a_flood_is_more_than_is_read() -> None:
    flood = Flood()
    assert not any(flood.rises() for _ in range(BURST))
    assert any(flood.rises() for _ in range(BURST))
