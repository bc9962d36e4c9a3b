"""A scripted judge model: a real HTTP server with the chat completions of an OpenAI-compatible endpoint.

It reads the prompt as a model would: by its blocks and ids. A script decides the answer; `graded` writes a valid one:

    async with ScriptedJudge(lambda asked: graded(asked, lambda trajectory: 1.0)) as judge:
        ...  # ask judge.url
        assert judge.asked[0].ids == [...]
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

__all__ = ["Asked", "Refusal", "Said", "ScriptedJudge", "decided", "graded", "last_answer"]

BLOCK = re.compile(r'<trajectory id="([^"]*)">\n(.*?)\n</trajectory>', re.DOTALL)
ANSWER = re.compile(r'<answer id="([^"]*)">\n(.*?)\n</answer>', re.DOTALL)
CONTEXT = re.compile(r"<context>\n(.*?)\n</context>", re.DOTALL)
TOKEN_CHARACTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A received request."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    index: int
    """Requests received before this one."""

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        return self.body["messages"]  # type: ignore[no-any-return]

    @property
    def data(self) -> str:
        """The message with the trajectories."""
        return next(message["content"] for message in self.messages if message["role"] == "user")

    @property
    def ids(self) -> list[str]:
        """Trajectory ids in the order shown."""
        return [name for name, _ in BLOCK.findall(self.data)]

    @property
    def trajectories(self) -> dict[str, dict[str, Any]]:
        """Trajectories by id."""
        return {name: json.loads(text) for name, text in BLOCK.findall(self.data)}

    @property
    def answer(self) -> tuple[str, dict[str, Any]]:
        """The id and the data of the answer to decide on."""
        ((name, text),) = ANSWER.findall(self.data)
        return name, json.loads(text)

    @property
    def context(self) -> list[dict[str, Any]]:
        """The common beginning of the conversations."""
        found = CONTEXT.search(self.data)
        return [] if found is None else json.loads(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A completion."""

    content: str | None
    finish_reason: str = "stop"
    refusal: str | None = None
    input_tokens: int | None = None
    """None: estimated from the request."""
    output_tokens: int | None = None
    after: asyncio.Event | None = None
    """Event to await before answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that is not a completion."""

    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    message: str = "scripted"
    code: str | None = None
    body: str | None = None
    """The body as it is, in place of the error object."""


Script = Callable[[Asked], Said | Refusal | Awaitable[Said | Refusal]]


def last_answer(trajectory: Mapping[str, Any]) -> str:
    """Text of the agent's last message; empty without one."""
    texts = [str(it.get("content") or "") for it in trajectory["messages"] if it.get("role") == "assistant"]
    return texts[-1] if texts else ""


def graded(
    asked: Asked, score: Callable[[Mapping[str, Any]], float], *, explanation: str = "as scripted", fence: bool = False
) -> Said:
    """A valid answer.

    Args:
        asked: The request.
        score: Score of a trajectory.
        explanation: Explanation of every score.
        fence: Whether to write the object in a block of Markdown.
    """
    scores = [
        {"trajectory_id": name, "explanation": explanation, "score": score(trajectory)}
        for name, trajectory in asked.trajectories.items()
    ]
    text = json.dumps({"scores": scores})
    return Said(content=f"```json\n{text}\n```" if fence else text)


def decided(asked: Asked, correct: Callable[[str], bool], *, explanation: str = "as scripted") -> Said:
    """A valid verdict on an answer."""
    name, data = asked.answer
    verdict = {"answer_id": name, "explanation": explanation, "correct": correct(data["answer"])}
    return Said(content=json.dumps(verdict))


class ScriptedJudge:
    """The server.

    Args:
        script: Decides each answer.
        host: The address to listen on.
        port: Its port; 0 takes a free one.
    """

    def __init__(self, script: Script, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.script = script
        self._listen = (host, port)
        self.asked: list[Asked] = []
        self.most_running = 0
        """Largest number of concurrent requests."""
        self._running = 0
        self._runner: web.AppRunner | None = None
        self._address = ""

    @property
    def url(self) -> str:
        """Base URL, with /v1."""
        return f"{self._address}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._listen)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(body=await request.json(), headers=dict(request.headers), index=len(self.asked))
        self.asked.append(asked)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            answer = self.script(asked)
            answer = answer if isinstance(answer, Said | Refusal) else await answer
            if isinstance(answer, Said) and answer.after is not None:
                await answer.after.wait()
        finally:
            self._running -= 1
        return _refused(answer) if isinstance(answer, Refusal) else _said(asked, answer)


def _refused(answer: Refusal) -> web.Response:
    error = {"error": {"message": answer.message, "type": "scripted", "code": answer.code}}
    body = json.dumps(error) if answer.body is None else answer.body
    return web.Response(
        status=answer.status, headers=dict(answer.headers), body=body.encode(), content_type="application/json"
    )


def _said(asked: Asked, answer: Said) -> web.Response:
    prompt = sum(len(message["content"]) for message in asked.messages) // TOKEN_CHARACTERS
    reply = len(answer.content or "") // TOKEN_CHARACTERS
    usage = {
        "prompt_tokens": prompt if answer.input_tokens is None else answer.input_tokens,
        "completion_tokens": reply if answer.output_tokens is None else answer.output_tokens,
    }
    message = {"role": "assistant", "content": answer.content, "refusal": answer.refusal}
    return web.json_response(
        {
            "id": f"chatcmpl-{asked.index}",
            "object": "chat.completion",
            "created": 0,
            "model": asked.body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
    )
