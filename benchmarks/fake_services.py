"""Cheap servers for a rollout worker under test: an engine that answers after 50 ms, tools, a judge, and a collector
that counts spans.

`python -m benchmarks.fake_services TOKENIZER` prints `{"engine": port, "services": port}` and serves until its input
closes.
"""

# ruff: noqa: ARG002 - gRPC hands each method a request and a context

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import grpc
import uvloop
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as opb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as ostubs
from tests.fakes.ports import free_port
from tokenizers import Tokenizer

from kestrl._shared import rpc
from kestrl.api.judge.v1 import judge_pb2 as jpb
from kestrl.api.judge.v1 import judge_pb2_grpc as jstubs
from kestrl.api.tools.v1 import tools_pb2 as tpb
from kestrl.api.tools.v1 import tools_pb2_grpc as tstubs

LATENCY = 0.05
TURNS = 4
TOOL = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "kestrel"}}\n</tool_call><|im_end|>'
FINAL = "A kestrel is a small falcon that hovers.<|im_end|>"
REQUEST = re.compile(rb'"request_id": ?"[^"]*/(\d+)/\d+"')
MODEL = re.compile(rb'"model": ?"([^"]*)"')


def completions(tokenizer: Path) -> tuple[list[bytes], list[int]]:
    """Response bodies (after the model's name) of a call and of a final answer, with their numbers of tokens."""
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    bodies, lengths = list[bytes](), list[int]()
    for text in (CALL, FINAL):
        ids = encode(text, add_special_tokens=False).ids
        content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -0.25 - token / 1e5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        bodies.append(json.dumps({"choices": [choice]}).encode()[1:])
        lengths.append(len(ids))
    return bodies, lengths


class Engine(asyncio.Protocol):
    """One HTTP/1.1 connection with a minimal parser."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            asyncio.get_running_loop().call_later(LATENCY, self._answer, body)

    def _answer(self, body: bytes) -> None:
        asked, model = REQUEST.search(body), MODEL.search(body)
        assert asked is not None
        assert model is not None
        text = b'{"model": "' + model[1] + b'", ' + self._bodies[int(asked[1]) == TURNS - 1]
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text
        )


class Tools(tstubs.ToolServiceServicer):
    async def ListTools(self, request: Any, context: Any) -> tpb.ListToolsResponse:
        schema = tpb.ToolSchema(name="look_up", description="Looks a word up.", parameters_json=json.dumps(TOOL))
        return tpb.ListToolsResponse(tools=[schema])

    async def Call(self, request: tpb.CallRequest, context: Any) -> tpb.CallResponse:
        return tpb.CallResponse(outcome="ok", text='{"meaning": "a small falcon"}', data_json="{}")

    async def Close(self, request: Any, context: Any) -> tpb.CloseResponse:
        return tpb.CloseResponse()


class Judge(jstubs.JudgeServiceServicer):
    async def ScoreGroup(self, request: jpb.ScoreGroupRequest, context: Any) -> jpb.ScoreGroupResponse:
        scores = [jpb.EpisodeScore(episode_id=episode.id, reward=1.0) for episode in request.group.episodes]
        return jpb.ScoreGroupResponse(scores=scores)


class Spans(ostubs.TraceServiceServicer):
    async def Export(self, request: Any, context: Any) -> opb.ExportTraceServiceResponse:
        return opb.ExportTraceServiceResponse()


async def serve(tokenizer: Path) -> None:
    bodies, lengths = completions(tokenizer)
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(lambda: Engine(bodies), "127.0.0.1", 0, backlog=4096)
    port = free_port()

    def register(server: grpc.aio.Server) -> None:
        tstubs.add_ToolServiceServicer_to_server(Tools(), server)
        jstubs.add_JudgeServiceServicer_to_server(Judge(), server)
        vars(ostubs)["add_TraceServiceServicer_to_server"](Spans(), server)

    closed = loop.run_in_executor(None, sys.stdin.read)
    serving = asyncio.create_task(rpc.serve("fakes", f"127.0.0.1:{port}", register, until=closed, bundles=True))
    async with rpc.channel(f"127.0.0.1:{port}") as own:
        await own.channel_ready()
    said = {"engine": engine.sockets[0].getsockname()[1], "services": port, "call": lengths[0], "final": lengths[1]}
    print(json.dumps(said), flush=True)
    await serving


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
