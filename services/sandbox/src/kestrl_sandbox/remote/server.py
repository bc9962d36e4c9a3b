"""`kestrl sandbox serve`: the sandbox behind SandboxFusion's HTTP interface.

`POST /run_code`, `POST /run_jupyter` and `GET /v1/ping` have its fields, so that recipes written for it need only
another URL. A response has two fields more: `outcome` and `truncated`. `GET /v1/slot` is a WebSocket for the tool
service of a job (`remote_slot`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from kestrl.errors import UserInputError
from kestrl_sandbox.contract import (
    Echo,
    Language,
    Limits,
    Outcome,
    Result,
    Run,
    SandboxBusy,
    SandboxFailure,
    SandboxSession,
)
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.origin import foreign_page
from kestrl_sandbox.remote.slot_server import IDLE_SECONDS, SlotServer
from kestrl_sandbox.remote.wire import SLOT_PATH

log = logging.getLogger(__name__)
MAX_BODY = 96 << 20
MAX_CELLS = 1000
MAX_ERRORS = 20
TRUNCATED = "[output truncated]"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CodeRequest(BaseModel):
    """Body of `/run_code`; `compile_timeout` is accepted and has no use: nothing is compiled."""

    code: str
    language: Language
    run_timeout: float = Field(10, gt=0, le=3600)
    compile_timeout: float = 10
    memory_limit_MB: int = -1  # noqa: N815 - SandboxFusion's name
    stdin: str | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class JupyterRequest(BaseModel):
    """Body of `/run_jupyter`."""

    cells: list[str] = Field(max_length=MAX_CELLS)
    cell_timeout: float = Field(0, ge=0, le=3600)
    """Seconds for each cell; 0 is no limit but the total one."""
    total_timeout: float = Field(45, gt=0, le=3600)
    memory_limit_MB: int = -1  # noqa: N815
    kernel: str = "python3"
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


def application(
    pool: SandboxPool, read_token: Callable[[], str | None] | None, *, idle_seconds: float = IDLE_SECONDS
) -> web.Application:
    """The HTTP application.

    Args:
        pool: Where code runs.
        read_token: Reads the bearer token that every request but a ping has to show; None for none. It is read for
            each request, so that a changed one is in force at once; while there is none, every request is refused.
        idle_seconds: Time without a request after which a connection of `GET /v1/slot` is closed, with its session.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if foreign := foreign_page(request.headers, by_name=read_token is not None):
            return web.json_response({"detail": foreign}, status=403)
        if read_token is not None and request.path != "/v1/ping" and not _shows(request, read_token()):
            return web.json_response({"detail": "the bearer token is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except SandboxBusy as error:
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            return web.json_response({"detail": str(error)}, status=429, headers=headers)
        except SandboxFailure as error:
            log.warning("a run failed: %s", error)
            return web.json_response({"status": "SandboxError", "message": str(error.failure()), "files": {}})
        except ValidationError as error:
            # As FastAPI reports it, which clients of SandboxFusion know.
            # Without the input, which may be megabytes, and bytes that JSON does not hold.
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            return web.json_response({"detail": problems[:MAX_ERRORS]}, status=422)
        except UserInputError as error:
            return web.json_response({"detail": str(error)}, status=422)

    async def ping(_request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def run_code(request: web.Request) -> web.Response:
        body = CodeRequest.model_validate_json(await request.read())
        run = Run(
            code=body.code,
            language=body.language,
            stdin=(body.stdin or "").encode("utf-8", "surrogatepass"),
            files=_decoded(body.files),
            fetch=body.fetch_files,
            limits=Limits(seconds=body.run_timeout, memory_mb=_memory(body.memory_limit_MB)),
        )
        return web.json_response(_code_response(await pool.run(run)))

    async def run_jupyter(request: web.Request) -> web.Response:
        body = JupyterRequest.model_validate_json(await request.read())
        if body.kernel != "python3":
            raise UserInputError(f"kernel: there is only python3, not {body.kernel!r}")
        session = await pool.session()
        try:
            return web.json_response(await _notebook(session, body))
        finally:
            await session.close()

    app = web.Application(middlewares=[guarded], client_max_size=MAX_BODY)
    slots = SlotServer(pool, idle_seconds)
    app.on_shutdown.append(slots.close)
    app.router.add_get("/v1/ping", ping)
    app.router.add_get(SLOT_PATH, slots.serve)
    app.router.add_post("/run_code", run_code)
    app.router.add_post("/run_jupyter", run_jupyter)
    return app


def _shows(request: web.Request, token: str | None) -> bool:
    """Whether a request has the token: as a bearer token, or as the password of a URL such as http://:TOKEN@host."""
    if not token:
        return False
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    # Headers and variables may have bytes that are no UTF-8.
    return hmac.compare_digest(value.encode("utf-8", "surrogateescape"), token.encode("utf-8", "surrogateescape"))


def _memory(megabytes: int) -> int | None:
    return megabytes if megabytes > 0 else None


def _decoded(files: Mapping[str, str | None]) -> dict[str, bytes]:
    """Files of a request.

    Raises:
        UserInputError: One is not base64.
    """
    decoded: dict[str, bytes] = {}
    for path, text in files.items():
        try:
            decoded[path] = base64.b64decode(text or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserInputError(f"files: {path[:80]!r} is not base64: {error}") from error
    return decoded


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def _code_response(result: Result) -> dict[str, Any]:
    return {
        "status": "Success" if result.outcome is Outcome.OK else "Failed",
        "message": result.message,
        "compile_result": None,
        "run_result": _command(result),
        "executor_pod_name": socket.gethostname(),
        "files": _encoded(result.files),
        "outcome": result.outcome.value,
        "truncated": result.truncated,
    }


def _command(result: Result) -> dict[str, Any]:
    """A result as SandboxFusion's `CommandRunResult`: a signal is a negative code, as Python's subprocess has it."""
    code = result.exit_code if result.signal is None else -result.signal
    if code is None and result.outcome is not Outcome.TIMEOUT:
        code = 1
    return {
        "status": "TimeLimitExceeded" if result.outcome is Outcome.TIMEOUT else "Finished",
        "execution_time": result.seconds,
        "return_code": code,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace") or (result.message if code else ""),
    }


async def _notebook(session: SandboxSession, body: JupyterRequest) -> dict[str, Any]:
    """Runs the cells one after the other, also after an exception, as a kernel does; a timeout ends them."""
    cells: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    started = loop.time()
    files = _decoded(body.files)
    last = Result(outcome=Outcome.OK)
    sources: Sequence[str] = body.cells or [""]
    for index, code in enumerate(sources):
        remaining = body.total_timeout - (loop.time() - started)
        if remaining <= 0:
            last = Result(outcome=Outcome.TIMEOUT, message=f"Timed out: more than {body.total_timeout:g} s in total.")
            break
        seconds = min(remaining, body.cell_timeout or remaining)
        fetch = body.fetch_files if index == len(sources) - 1 else []
        limits = Limits(seconds=max(seconds, 0.001), memory_mb=_memory(body.memory_limit_MB))
        last = await session.run(Run(code=code, echo=Echo.DISPLAY, files=files, fetch=fetch, limits=limits))
        files = {}
        if last.outcome is Outcome.TIMEOUT:
            break
        cells.append(_cell(last))
    finished = last.outcome is not Outcome.TIMEOUT
    return {
        "status": "Success" if finished else "Failed",
        "message": "" if finished else last.message,
        "driver": {
            "status": "Finished" if finished else "TimeLimitExceeded",
            "execution_time": loop.time() - started,
            "return_code": 0 if finished else None,
            "stdout": "",
            "stderr": "" if finished else last.message,
        },
        "cells": cells if finished else [],
        "executor_pod_name": socket.gethostname(),
        "files": _encoded(last.files),
        "outcome": last.outcome.value,
    }


def _cell(result: Result) -> dict[str, Any]:
    error = result.error
    return {
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": "" if error else result.stderr.decode(errors="replace"),
        "display": [] if result.display is None else [{"text/plain": result.display}],
        "error": []
        if error is None
        else [{"ename": error["type"], "evalue": error["text"], "traceback": error["traceback"].splitlines()}],
        "outcome": result.outcome.value,
        "truncated": result.truncated,
    }
