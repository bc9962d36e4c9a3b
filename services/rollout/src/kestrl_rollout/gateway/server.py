"""The worker's HTTP server for episodes that are served: `/e/<episode>/...`."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from kestrl._shared.text.chat_model import ChatModel
from kestrl.agents import Endpoint
from kestrl.errors import KestrlError
from kestrl_rollout.gateway import mcp
from kestrl_rollout.gateway.chat_types import new_id
from kestrl_rollout.gateway.dialogue import Dialogue
from kestrl_rollout.gateway.faces import COMPLETIONS, FACES, RESPONSES, Face
from kestrl_rollout.gateway.failures import OVER, GatewayProblem, problem_of
from kestrl_rollout.gateway.fields import Refused, check_forced, job_sampling, read_object
from kestrl_rollout.gateway.generate import read_request, write_answer
from kestrl_rollout.gateway.opened import MAX_CALLS, Opened, digest, is_key
from kestrl_rollout.gateway.response_store import ResponseStore
from kestrl_rollout.gateway.sampler import REFUSED, Sampler, count
from kestrl_rollout.gateway.streaming import stream
from kestrl_rollout.history.system_messages import takes_several

BODY_BYTES = 32 * 1024 * 1024
"""Largest request: a million token ids are about 7 MB."""
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - compared, for pods that are called by their own address
REMEMBERED = 4096
"""Episodes that have ended and are still known, so that a late call learns of it."""
GENERATE = "inference/v1/generate"
COUNT = "/count_tokens"
SERVED = (GENERATE, *FACES, f"v1/messages{COUNT}", mcp.PATH)
"""Paths behind that of an episode to which calls are posted."""


class Gateway:
    """Serves episodes by URL. Listens once a first episode is served."""

    def __init__(self, chat_model: ChatModel, listen: str = "127.0.0.1:0", *, refused: Sequence[str] = ()) -> None:
        """Listens later.

        Args:
            chat_model: Renders and parses for clients that send messages.
            listen: `host:port`; port 0 is any.
            refused: Fields that are refused where they would be counted as not obeyed.
        """
        self._chat_model, self._refused = chat_model, tuple(refused)
        self._joins_system = not takes_several(chat_model.chat)
        host, _, port = listen.rpartition(":")
        self._listen = (host, int(port))
        self._episodes: dict[str, Opened] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        """Digests of the keys of ended episodes."""
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def serve(self, sampler: Sampler) -> AsyncGenerator[Endpoint]:
        """Serves an episode while the context is open."""
        async with self._starting:
            if self._runner is None:
                # In a context of its own: that of the loop which happens to be first has its span and its user's code.
                self._runner = await asyncio.get_running_loop().create_task(self._started(), context=Context())
        episode, key = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        opened = self._episodes[episode] = Opened(
            sampler,
            Dialogue(self._chat_model, sampler, joins_system=self._joins_system),
            ResponseStore(),
            digest(key),
            copy_context(),
        )
        try:
            host, port = self._runner.addresses[0][:2]
            if host == ANY_ADDRESS:
                host = socket.gethostbyname(socket.gethostname())  # of a pod: the first line of its /etc/hosts
            yield Endpoint(base_url=f"http://{host}:{port}/e/{episode}/v1", api_key=key)
        finally:
            del self._episodes[episode]
            self._ended[episode] = opened.key
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            await opened.close()

    async def _started(self) -> web.AppRunner:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/e/{episode}/{path:.*}", self._handle)
        # A client that goes away cancels its call.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, *self._listen).start()
        return runner

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        face = FACES.get(path.removesuffix(COUNT), COMPLETIONS)
        episode = request.match_info["episode"]
        opened = self._episodes.get(episode)
        key = self._ended.get(episode) if opened is None else opened.key
        if key is None or not is_key(key, request.headers):
            return _refusal(
                face, GatewayProblem(401, "the key is not that of the episode in the URL", "invalid_api_key")
            )
        if opened is None:
            return _refusal(face, OVER)
        route = (request.method, path)
        if route == ("GET", "v1/models"):
            return web.json_response(_models(opened))
        if path == mcp.PATH and request.method != "POST":
            return web.Response(status=405, headers={"allow": "POST"})  # there are no sessions, and no stream of them
        if request.method != "POST" or path not in SERVED:
            served = ", ".join(f"POST /e/<episode>/{path_served}" for path_served in SERVED)
            message = f"{request.method} {request.path} is not served; GET /e/<episode>/v1/models, {served} are"
            return _refusal(face, GatewayProblem(404, message, "not_found"))
        if len(opened.tasks) >= MAX_CALLS:
            busy = f"{MAX_CALLS} calls of the episode are in flight"
            return _refusal(face, GatewayProblem(429, busy, "too_many_calls", headers={"retry-after": "1"}))
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _refusal(face, GatewayProblem(413, f"the body has more than {BODY_BYTES} bytes", "too_large"))
        if self._episodes.get(episode) is not opened:
            return _refusal(face, OVER)
        try:
            if path == GENERATE:
                return _json(await self._answer(opened, request, body, lambda: self._sample(opened, body)))
            if path == mcp.PATH:
                return await self._tool_call(opened, body)
            return await self._chat(opened, request, body, face)
        except (Refused, KestrlError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            if isinstance(error, Refused):
                count(opened.sampler.metrics, f"{REFUSED}{error.code}")
            return _refusal(face, problem_of(error))

    async def _answer(
        self,
        opened: Opened,
        request: web.Request,
        body: bytes,
        work: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> bytes:
        retry = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        return await opened.answer(request.path.encode() + b"\n" + body, retry=retry, work=work)

    async def _tool_call(self, opened: Opened, body: bytes) -> web.Response:
        tools = opened.sampler.job_tools
        request = mcp.read(body, tools.schemas)
        if isinstance(request, mcp.McpAnswer):
            content = b"" if request.body is None else mcp.written(request.body)
            return web.Response(status=request.status, body=content, content_type="application/json")

        async def work() -> bytes:
            try:
                return mcp.written(mcp.answered(request, await tools.call(request.name, request.arguments)))
            except KestrlError as error:
                return mcp.written(mcp.failed(request, problem_of(error)))

        return _json(await opened.complete(work()))

    async def _sample(self, opened: Opened, body: bytes) -> bytes:
        limits, metrics = opened.sampler.limits, opened.sampler.metrics
        token_request = read_request(
            body,
            vocabulary=self._chat_model.vocabulary.size,
            context_length=limits.context_length,
            sampling=job_sampling(limits),
        )
        for name in token_request.metrics:
            count(metrics, name)
        completion = await opened.sampler.generate_served(token_request.call)
        prompt_tokens = len(token_request.call.prompt_ids)
        answer = write_answer(completion, answer_id=new_id("generate-"), prompt_tokens=prompt_tokens)
        return msgspec.json.encode(answer)

    async def _chat(self, opened: Opened, request: web.Request, body: bytes, face: Face) -> web.StreamResponse:
        call = opened.responses.resolved(face.read(read_object(body), job_sampling(opened.sampler.limits)))
        check_forced(call.metrics, self._refused)
        if request.match_info["path"].endswith(COUNT):
            return web.json_response({"input_tokens": opened.dialogue.count_tokens(call.history)})

        async def work() -> bytes:
            reply = await opened.dialogue.reply(call)
            answer_fields = face.write(reply, call)
            if face is RESPONSES:
                opened.responses.keep(answer_fields["id"], call, reply)
            return msgspec.json.encode(answer_fields)

        answer = self._answer(opened, request, body, work)
        if not call.stream:
            return _json(await answer)
        return await stream(request, answer, call, face)


def _models(opened: Opened) -> dict[str, Any]:
    length = opened.sampler.limits.context_length
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "kestrl", "max_model_len": length}
    return {"object": "list", "data": [model]}


def _json(answer: bytes) -> web.Response:
    return web.Response(body=answer, content_type="application/json")


def _refusal(face: Face, problem: GatewayProblem) -> web.Response:
    body = face.error(problem.status, problem.message, problem.code, problem.param)
    return web.json_response(body, status=problem.status, headers=problem.headers)
