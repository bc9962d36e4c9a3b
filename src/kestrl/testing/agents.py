"""Conformance suite of agents by URL: what every `kestrl.agents.runs.Run` must bear, without a model.

A user's test calls `check_run(agent)` with the function that the manifest names in `agent.run`, or with a function that
starts its program. The suite serves episodes over the Chat Completions API and says what it is given to say. It raises
AssertionError with the property that does not hold, or what the agent raised.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from kestrl.agents.runs import Run, run_result

EPISODES = 3
MOST_AFTER_END = 10
"""Calls that an agent may still make once its calls are refused: clients retry a few times."""
ROW: Mapping[str, Any] = {
    "id": "conformance-1",
    "ordinal": 0,
    "messages": [{"role": "user", "content": "What is 6 * 7?"}],
    "ground_truth": "42",
    "metadata": {},
}


@dataclass(slots=True)
class _Episode:
    """An episode that is served."""

    key: str
    calls: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list[str])


class _Server(ThreadingHTTPServer):
    """Serves episodes: each says the replies in turn, and refuses calls after `limit`."""

    daemon_threads = True

    def __init__(self, replies: Sequence[str | Mapping[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = list(replies)
        self.limit: int | None = None
        self.episodes: dict[str, _Episode] = defaultdict(lambda: _Episode(key=secrets.token_urlsafe(16)))
        self.lock = threading.Lock()

    def base_url(self, episode: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/e/{episode}/v1"

    def answer(self, path: str, key: str, body: bytes) -> tuple[int, dict[str, Any], bool]:
        """Status and body of the answer to a POST, and whether it is a stream."""
        _, _, name, route = path.split("/", 3) if path.count("/") >= 3 else ("", "", "", path)
        with self.lock:
            episode = self.episodes[name]
            if key != f"Bearer {episode.key}":
                episode.problems.append(f"a call was made with a key that is not its own: {path}")
                return 401, _error("the key is not that of the episode", "invalid_api_key"), False
            if route != "v1/chat/completions":
                episode.problems.append(f"POST {route} was called; this suite serves v1/chat/completions alone")
                return 404, _error(f"{route} is not served", "not_found"), False
            if self.limit is not None and episode.calls >= self.limit:
                episode.refused += 1
                return 400, _error("the episode's limit is reached: max_turns", "limit_reached"), False
            reply = self.replies[min(episode.calls, len(self.replies) - 1)]
            episode.calls += 1
            number = episode.calls
        request: Any = json.loads(body)
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
        return 200, _completion(message, f"chatcmpl-{name}-{number}"), request.get("stream") is True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        server = cast("_Server", self.server)
        status, answer, stream = server.answer(self.path, self.headers.get("authorization", ""), body)
        content = _chunks(answer) if stream else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if stream else "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the standard library names it
        """Writes no log."""


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}


def _completion(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _chunks(answer: Mapping[str, Any]) -> bytes:
    """A completion as a stream of one chunk."""
    choice: Mapping[str, Any] = answer["choices"][0]
    message: Mapping[str, Any] = choice["message"]
    calls: list[dict[str, Any]] = [
        {"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())
    ]
    delta: dict[str, Any] = {**message, **({"tool_calls": calls} if calls else {})}
    chunk: dict[str, Any] = {
        **answer,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"


def check_run(
    run: Run,
    *,
    replies: Sequence[str | Mapping[str, Any]] = ("42",),
    row: Mapping[str, Any] = ROW,
    seconds: float = 60.0,
) -> None:
    """Checks an agent.

    Args:
        run: The agent, sync or async.
        replies: What the model says, turn by turn: texts, or messages with `tool_calls`. The last one is repeated.
        row: The scenario.
        seconds: Time limit of an episode.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    with _serving(replies) as server:
        outcomes = _episodes(server, run, row, [f"first-{index}" for index in range(EPISODES)], seconds)
        for name, (error, returned) in outcomes.items():
            if error is not None:
                raise AssertionError(f"{name}: the agent raised {error!r}") from error
            run_result("the agent", json.loads(json.dumps(returned)))
        _check_calls(server)
        server.limit = 1
        _episodes(server, run, row, ["limited"], seconds)  # it may raise what its client raises
        limited = server.episodes["limited"]
        if limited.refused > MOST_AFTER_END:
            raise AssertionError(
                f"{limited.refused} calls were made after the first was refused with 400, limit_reached: end the run"
            )
        _check_calls(server)


def _check_calls(server: _Server) -> None:
    for name, episode in server.episodes.items():
        if episode.problems:
            raise AssertionError(f"{name}: {episode.problems[0]}")
        if not episode.calls:
            raise AssertionError(f"{name}: no call was made to its base URL")


@contextmanager
def _serving(replies: Sequence[str | Mapping[str, Any]]) -> Generator[_Server]:
    with _Server(replies) as server:
        thread = threading.Thread(target=server.serve_forever, name="conformance-server", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _episodes(
    server: _Server, run: Run, row: Mapping[str, Any], names: Sequence[str], seconds: float
) -> dict[str, tuple[BaseException | None, object]]:
    """Runs episodes at once, each in a thread: what each raised and returned."""
    threads = ThreadPoolExecutor(max_workers=len(names))
    try:
        running = {
            name: threads.submit(
                _run, run, row, server.base_url(name), server.episodes[name].key, time.time() + seconds
            )
            for name in names
        }
        outcomes: dict[str, tuple[BaseException | None, object]] = {}
        for name, future in running.items():
            try:
                error = future.exception(seconds)
            except TimeoutError:
                raise AssertionError(f"{name}: the run did not end within {seconds:g} s") from None
            outcomes[name] = (error, None if error is not None else future.result())
        return outcomes
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _run(run: Run, row: Mapping[str, Any], base_url: str, key: str, deadline: float) -> object:
    returned = run(json.loads(json.dumps(row)), base_url, key, deadline)
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned: Any) -> object:
    return await returned
