"""Environments behind a server of OpenEnv, one WebSocket an episode: the model's turns are their actions.

Runs in the interpreter of the environment. A turn is the action as a JSON object, or, where an action has one required
field of text, that text. Rewards are summed over the steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import IO, Any, ClassVar, cast

from kestrl.errors import Boundary, ToolFailure, UserInputError
from kestrl.tools import ToolError, ToolResult
from kestrl_tools.environments import openenv_tasks

LOOPBACK = "127.0.0.1"
START_SECONDS = 540.0
"""Time in which a started server has to answer; the environment's own start timeout is usually shorter."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 300.0
"""Longest wait for an answer; the deadline of a call is usually shorter."""
REQUEST_SECONDS = 10.0
LARGEST_MESSAGE = 16 * 2**20
CAPACITY = "CAPACITY_REACHED"
INVALID = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors that the model can correct."""
SERVERS_FIELDS = frozenset({"metadata"})
"""Fields of an action that are not the model's to fill."""
HIDDEN = frozenset({"reward", "done", "metadata"})
"""Fields of an observation that are not shown."""


class OpenEnv:
    """One episode of a server."""

    _url: ClassVar[str] = ""
    _schema: ClassVar[Mapping[str, Any]] = {}
    _server: ClassVar[subprocess.Popen[bytes] | None] = None

    def __init__(self, url: str | None, app: str | None) -> None:
        del url, app  # `start_service` has used them
        self._socket: Any = None
        self._open = contextlib.ExitStack()
        self._reward = 0.0

    @classmethod
    def start_service(cls, url: str | None, app: str | None) -> None:
        """Starts the server, or looks for a running one; sessions are forked from this process and reach it too.

        Raises:
            UserInputError: It does not answer as a server of OpenEnv.
        """
        process: subprocess.Popen[bytes] | None = None
        log: IO[bytes] | None = None
        if app is not None:
            with socket.socket() as listener:
                listener.bind((LOOPBACK, 0))
                port = listener.getsockname()[1]
            command = (sys.executable, "-m", "uvicorn", app, "--host", LOOPBACK, "--port", str(port))
            log = tempfile.TemporaryFile()  # noqa: SIM115 - the server's, for as long as it lives
            process = subprocess.Popen(  # noqa: S603 - the manifest's app
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the manifest's folder, too
            )
            url = f"http://{LOOPBACK}:{port}"
        assert url is not None
        cls._url, cls._server = url.rstrip("/"), process
        cls._schema = _awaited_schema(cls._url, process, log)

    @classmethod
    def stop_service(cls) -> None:
        """Ends the server that was started."""
        if cls._server is not None:
            cls._server.kill()
            cls._server.wait()

    @classmethod
    def address(cls) -> str:
        """URL of the server."""
        return cls._url

    def reset(self, prompt: Any = None, reset: Mapping[str, Any] | None = None, digest: str | None = None) -> str:
        """Begins the episode; what the environment shows first.

        Args:
            prompt: Prompt of the row; without one, the form of an action is said too.
            reset: Arguments of the server's reset, such as `{"seed": 1}`.
            digest: That of the task with the `split` and `index` of `reset`, as `kestrl data openenv` writes it.
        """
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        if digest is not None and reset is not None and "index" in reset:
            _check_task(self._url, reset, digest)
        address = f"ws{self._url.removeprefix('http')}/ws"
        try:
            connecting = connect(address, max_size=LARGEST_MESSAGE, open_timeout=REQUEST_SECONDS, proxy=None)
            self._socket = self._open.enter_context(connecting)
        except (OSError, WebSocketException) as error:
            raise _lost(f"{address} cannot be reached: {error}") from error
        opening = _shown(self._asked("reset", dict(reset or {}))["observation"])
        return opening if prompt is not None else "\n\n".join(filter(None, (opening, self._form())))

    def act(self, text: str) -> ToolResult:
        """Takes a turn of the model as the action."""
        step = self._asked("step", self._action(text))
        reward = step.get("reward")
        if reward is not None:
            self._reward += float(reward)
        return ToolResult(text=_shown(step["observation"]), final=bool(step.get("done")))

    def get_reward(self) -> float:
        return self._reward

    def close(self) -> None:
        from websockets.exceptions import WebSocketException

        if self._socket is not None:
            with contextlib.suppress(OSError, WebSocketException):  # the server is gone
                self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The observation that answers a message.

        Raises:
            ToolError: The action is not one, which the model can correct.
            ToolFailure: The server failed, is full or is gone.
        """
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=ANSWER_SECONDS))
        except (OSError, WebSocketException, ValueError) as error:
            raise _lost(f"the server did not answer a {kind}: {type(error).__name__}: {error}") from error
        content: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "observation" and "observation" in content:
            return content
        code, message = content.get("code"), content.get("errors") or content.get("message") or answer
        if kind == "step" and code in INVALID:
            raise ToolError(f"This is not an action: {json.dumps(message, ensure_ascii=False, default=str)[:2000]}")
        if code == CAPACITY:
            raise ToolFailure(f"the server is full: {message}", code="tool_capacity", retryable=True)
        raise ToolFailure(f"the server refused a {kind}: {code}: {message}", code="tool_server_failed")

    def _action(self, text: str) -> dict[str, Any]:
        fields, required = _fields(self._schema)
        stripped = text.strip()
        try:
            action: Any = json.loads(stripped)
        except ValueError:
            action = None
        if isinstance(action, dict):
            return cast("dict[str, Any]", action)
        if len(required) == 1 and fields[required[0]].get("type") == "string":
            return {required[0]: stripped}
        raise ToolError(f"This is not an action: {self._form()}")

    def _form(self) -> str:
        """What an action looks like, for the model."""
        fields, required = _fields(self._schema)
        if len(required) == 1 and fields[required[0]].get("type") == "string":
            return ""
        descriptions = {
            name: {key: part[key] for key in ("type", "description", "enum") if key in part}
            for name, part in fields.items()
        }
        return (
            f"Answer with one JSON object and nothing else. Its fields: {json.dumps(descriptions, ensure_ascii=False)}"
        )


def _check_task(url: str, reset: Mapping[str, Any], digest: str) -> None:
    """Raises ToolFailure if the server has another task than when the row was written."""
    try:
        task = openenv_tasks.task(url, reset["split"], reset["index"])
    except (ValueError, KeyError) as error:
        raise _lost(f"the task of the row was not found: {error}") from error
    if openenv_tasks.task_digest(task) != digest:
        raise ToolFailure(
            f"task {reset['index']} of {reset['split']} is another one than when the row was written; write the rows "
            "again with kestrl data openenv",
            code="tool_row_changed",
        )


def _fields(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of an action, and the names of the required ones."""
    action: Any = schema.get("action") or {}
    properties: dict[str, Any] = action.get("properties") or {}
    fields = {name: part for name, part in properties.items() if name not in SERVERS_FIELDS}
    return fields, [name for name in action.get("required") or () if name in fields]


def _shown(observation: Any) -> str:
    """An observation as text: its only field of text, or all fields as JSON."""
    if not isinstance(observation, dict):
        return str(observation)
    visible = {name: value for name, value in cast("dict[str, Any]", observation).items() if name not in HIDDEN}
    if len(visible) == 1 and isinstance(only := next(iter(visible.values())), str):
        return only
    return json.dumps(visible, ensure_ascii=False, default=str)


def _awaited_schema(url: str, process: subprocess.Popen[bytes] | None, log: IO[bytes] | None) -> Mapping[str, Any]:
    deadline = time.monotonic() + (START_SECONDS if process is not None else REQUEST_SECONDS)
    while True:
        try:
            with urllib.request.urlopen(f"{url}/schema", timeout=REQUEST_SECONDS) as answer:  # noqa: S310 - http(s)
                return cast("Mapping[str, Any]", json.loads(answer.read(LARGEST_MESSAGE)))
        except (urllib.error.URLError, OSError, ValueError) as error:
            if process is not None and process.poll() is not None:
                raise UserInputError(f"openenv.app: the server ended: {_last_line(log)}") from error
            if time.monotonic() > deadline:
                raise UserInputError(f"openenv: {url}/schema does not answer as OpenEnv's does: {error}") from error
        time.sleep(POLL_SECONDS)


def _last_line(log: IO[bytes] | None) -> str:
    if log is None:
        return ""
    log.seek(0)
    lines = log.read(LARGEST_MESSAGE).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _lost(message: str) -> ToolFailure:
    return ToolFailure(message, code="tool_server_lost", retryable=True, boundary=Boundary.TOOL)
