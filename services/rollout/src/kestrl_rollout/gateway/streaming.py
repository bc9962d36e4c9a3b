"""Answers as server-sent events, made after generation: a comment keeps the connection alive until then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from kestrl.errors import KestrlError
from kestrl_rollout.gateway.chat_types import ChatRequest
from kestrl_rollout.gateway.faces import Face
from kestrl_rollout.gateway.failures import problem_of
from kestrl_rollout.gateway.fields import Refused

KEEP_ALIVE_SECONDS = 10.0
"""Time between comments: relays cut a connection that is silent for a minute."""


async def stream(
    request: web.Request, answer: Coroutine[Any, Any, bytes], call: ChatRequest, face: Face
) -> web.StreamResponse:
    """Answers a request with events. A failure before the first comment is raised, a later one is an event."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": keep-alive\n\n")
        try:
            answer_fields = json.loads(await task)
        except (Refused, KestrlError, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            cancelled = isinstance(error, asyncio.CancelledError) and (current is None or current.cancelling())
            if cancelled or not response.prepared:
                raise
            problem = problem_of(error)
            body = face.error(problem.status, problem.message, problem.code, problem.param)
            await response.write(face.error_event(body).encode())
        else:
            if not response.prepared:
                await response.prepare(request)
            for event in face.events(answer_fields, call):
                await response.write(event.encode())
        await response.write_eof()
    finally:
        task.cancel()  # no effect on one that is done
    return response
