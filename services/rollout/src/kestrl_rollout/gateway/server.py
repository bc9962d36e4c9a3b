"""The worker's HTTP server for episodes that are served, on the loopback interface: `/e/<episode>/...`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from kestrl.agents import Endpoint, LimitReached
from kestrl.errors import KestrlError, UserCodeError
from kestrl_rollout.gateway.generate import Refused, read_request, write_answer
from kestrl_rollout.gateway.opened import MAX_CALLS, Opened, digest, is_key
from kestrl_rollout.gateway.sampler import Sampler

BODY_BYTES = 32 * 1024 * 1024
"""Largest request: a million token ids are about 7 MB."""
REMEMBERED = 4096
"""Episodes that have ended and are still known, so that a late call learns of it."""
SERVED = "POST /e/<episode>/inference/v1/generate and GET /e/<episode>/v1/models"


class Gateway:
    """Serves episodes by URL. Listens once a first episode is served."""

    def __init__(self, *, vocabulary: int) -> None:
        """`vocabulary` is the number of the model's token ids."""
        self._vocabulary = vocabulary
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
        opened = self._episodes[episode] = Opened(sampler, digest(key), copy_context())
        try:
            host, port = self._runner.addresses[0][:2]
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
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        episode = request.match_info["episode"]
        opened = self._episodes.get(episode)
        key = self._ended.get(episode) if opened is None else opened.key
        if key is None or not is_key(key, request.headers):
            return _error(401, "the key is not that of the episode in the URL", "invalid_api_key")
        if opened is None:
            return _gone()
        route = (request.method, request.match_info["path"])
        if route == ("GET", "v1/models"):
            return web.json_response(_models(opened))
        if route != ("POST", "inference/v1/generate"):
            return _error(404, f"{request.method} {request.path} is not served; {SERVED} are", "not_found")
        if len(opened.tasks) >= MAX_CALLS:
            return _error(
                429, f"{MAX_CALLS} calls of the episode are in flight", "too_many_calls", {"retry-after": "1"}
            )
        return await self._generate(opened, request)

    async def _generate(self, opened: Opened, request: web.Request) -> web.Response:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body has more than {BODY_BYTES} bytes", "too_large")
        if self._episodes.get(request.match_info["episode"]) is not opened:
            return _gone()
        retry = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        try:
            answer = await opened.answer(body, retry=retry, work=lambda: self._sample(opened, body))
        except Refused as refusal:
            return _error(400, str(refusal), refusal.code, field=refusal.field)
        except LimitReached as error:
            return _error(400, str(error), error.code)
        except UserCodeError as error:
            return _error(400, str(error), error.code)
        except KestrlError as error:
            # The episode has failed, with this as its failure: no retry can help.
            return _error(500, str(error), f"{error.boundary}/{error.code}", {"x-should-retry": "false"})
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _gone()
        return web.Response(body=answer, content_type="application/json")

    async def _sample(self, opened: Opened, body: bytes) -> bytes:
        limits, metrics = opened.sampler.limits, opened.sampler.metrics
        call_request = read_request(
            body,
            vocabulary=self._vocabulary,
            context_length=limits.context_length,
            sampling={"temperature": limits.temperature, "top_p": limits.top_p, "top_k": limits.top_k or -1},
        )
        for name in call_request.forced:
            metrics[f"sampling_forced.{name}"] = metrics.get(f"sampling_forced.{name}", 0) + 1
        completion = await opened.sampler.generate_tokens(
            call_request.prompt_ids, max_tokens=call_request.max_tokens, stop_token_ids=call_request.stop_token_ids
        )
        answer = write_answer(
            completion, answer_id=f"generate-{secrets.token_hex(12)}", prompt_tokens=len(call_request.prompt_ids)
        )
        return json.dumps(answer).encode()


def _models(opened: Opened) -> dict[str, Any]:
    length = opened.sampler.limits.context_length
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "kestrl", "max_model_len": length}
    return {"object": "list", "data": [model]}


def _gone() -> web.Response:
    return _error(410, "the episode is over", "episode_over", {"x-should-retry": "false"})


def _error(
    status: int, message: str, code: str, headers: dict[str, str] | None = None, *, field: str = ""
) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "code": code, "param": field or None}
    return web.json_response({"error": error}, status=status, headers=headers)
