"""A client of the cases: plain HTTP, since clients of providers differ by version and hide what they send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kestrl.episode import Episode
from kestrl.testing.gateway.seam import Options, Served, Subject

SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS: Sequence[Mapping[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Looks up.", "parameters": SCHEMA}}
    for name in ("search", "other")
]
SYSTEM: Mapping[str, Any] = {"role": "system", "content": "You are a clerk."}
USER: Mapping[str, Any] = {"role": "user", "content": "Find the kestrel."}
SECONDS = 60.0
"""Time limit of a call, against a gateway that hangs."""


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> dict[str, Any]:
        """The message of a completion, as a client sends it back."""
        assert self.status == 200, f"{self.status}: {self.text}"
        message: dict[str, Any] = self.body["choices"][0]["message"]
        return message

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events that are JSON."""
        return [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]

    @property
    def error(self) -> Mapping[str, Any]:
        error: Mapping[str, Any] = self.body["error"]
        return error


def tool_result(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The message with the result of a call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


class Agent:
    """A client of one episode."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.root = served.base_url.removesuffix("/v1")

    async def request(
        self,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        began: asyncio.Event | None = None,
    ) -> Reply:
        """Sends a request behind the episode's path, with its key unless `headers` say otherwise. Sets `began` once the
        answer's content has begun.
        """
        request_headers = {"authorization": f"Bearer {self.served.api_key}"} if headers is None else headers
        async with asyncio.timeout(SECONDS):
            return await _request(f"{self.root}{path}", method, body, request_headers, began)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """A call of Chat Completions, with the tools unless `tools` say otherwise; None leaves a field out."""
        headers: Mapping[str, str] | None = fields.pop("headers", None)
        began: asyncio.Event | None = fields.pop("began", None)
        body = {"model": "policy", "messages": list(messages), "tools": TOOLS, **fields}
        body = {name: value for name, value in body.items() if name != "tools" or value is not None}
        return await self.request("/v1/chat/completions", body, headers=headers, began=began)

    async def messages(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """A call of Anthropic's Messages."""
        body = {"model": "policy", "max_tokens": 400, "messages": list(messages), **fields}
        return await self.request("/v1/messages", body, headers={"x-api-key": self.served.api_key})

    async def responses(self, items: Any, **fields: Any) -> Reply:
        """A call of Responses."""
        return await self.request("/v1/responses", {"model": "policy", "input": items, **fields})

    def retrying(self, count: int) -> dict[str, str]:
        """Headers of a client's own retry."""
        return {"authorization": f"Bearer {self.served.api_key}", "x-stainless-retry-count": str(count)}

    async def end(self) -> Episode:
        """Ends the episode, of which what holds of every episode is checked."""
        episode = await self.served.end()
        check_rows(self.served, episode)
        return episode


@asynccontextmanager
async def serving(subject: Subject, **options: Any) -> AsyncGenerator[Agent]:
    """A client of an episode that is served while the context is open."""
    async with subject.serve(Options(**options)) as served:
        yield Agent(served)


def forks(episode: Episode) -> dict[str, float]:
    """Calls that began a row, by reason."""
    return {name.partition(".")[2]: value for name, value in episode.metrics.items() if name.startswith("forks.")}


def check_rows(served: Served, episode: Episode) -> None:
    """What holds of every episode: rows and turns fit, a sampled token is trained once, and a turn stands behind the
    very prompt that the engine was sent.
    """
    trained = 0
    for row in episode.rows:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs), "ids, mask and log-probs differ in length"
        trained += sum(row.mask)
    sampled = sum(turn.end - turn.start for turn in episode.turns)
    assert trained == sampled, f"{sampled} tokens were sampled, {trained} are trained"
    prompts = {tuple(prompt.token_ids) for prompt in served.prompts}
    for turn in episode.turns:
        row = episode.rows[turn.row]
        assert set(row.mask[turn.start : turn.end]) == {1}, "a sampled token is not trained"
        assert tuple(row.token_ids[: turn.start]) in prompts, "the row before a turn is no prompt that was sent"


async def _request(
    url: str, method: str, body: object, headers: Mapping[str, str], began: asyncio.Event | None
) -> Reply:
    """A request by HTTP/1.0, whose answer ends with the connection. A call that is cancelled closes it."""
    address = urlsplit(url)
    content = b"" if body is None else json.dumps(body).encode()
    path = f"{address.path}?{address.query}" if address.query else address.path
    lines = [f"{method} {path} HTTP/1.0", f"host: {address.netloc}", f"content-length: {len(content)}"]
    lines += ["content-type: application/json", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write("\r\n".join(lines).encode() + content)
        await writer.drain()
        answer = b""
        while chunk := await reader.read(65_536):
            answer += chunk
            if began is not None and not answer.endswith(b"\r\n\r\n"):
                began.set()
    finally:
        writer.close()
    head, _, response_body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    pairs = (field.partition(":") for field in fields)
    return Reply(
        int(status.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}, response_body.decode()
    )
