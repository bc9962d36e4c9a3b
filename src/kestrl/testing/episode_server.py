"""A server of episodes for conformance suites: it speaks the Chat Completions API and says what it is given to say."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

GATE_SECONDS = 600.0
Reply = str | Mapping[str, Any]
"""Text of the model's turn, or a message with `tool_calls`."""


@dataclass(slots=True)
class ServedEpisode:
    """An episode that is served."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    replies: Sequence[Reply] = ()
    """What the model says in it; nothing for what it says in all."""
    refused: int = 0
    problems: list[str] = field(default_factory=list[str])
    requests: list[Any] = field(default_factory=list[Any])
    """Messages of each call."""
    called: threading.Event = field(default_factory=threading.Event)
    """Set with the first call."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Answers wait until it is set, for `GATE_SECONDS` at most."""

    @property
    def calls(self) -> int:
        return len(self.requests)


class EpisodeServer(ThreadingHTTPServer):
    """Serves episodes: each says the replies in turn, and refuses calls after `limit`."""

    daemon_threads = True

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = list(replies)
        self.limit: int | None = None
        self.episodes: dict[str, ServedEpisode] = defaultdict(_open_episode)
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
            replies = episode.replies or self.replies
            reply = replies[min(episode.calls, len(replies) - 1)]
            request: Any = json.loads(body)
            episode.requests.append(request.get("messages"))
            number = episode.calls
        episode.called.set()
        episode.gate.wait(GATE_SECONDS)
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
        return 200, _completion(message, f"chatcmpl-{name}-{number}"), request.get("stream") is True


def _open_episode() -> ServedEpisode:
    """An episode whose calls are answered at once."""
    episode = ServedEpisode()
    episode.gate.set()
    return episode


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        server = cast("EpisodeServer", self.server)
        status, answer, stream = server.answer(self.path, self.headers.get("authorization", ""), body)
        content = _chunks(answer) if stream else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if stream else "application/json")
        self.send_header("content-length", str(len(content)))
        with suppress(ConnectionError):  # the client is gone
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


@contextmanager
def serving(replies: Sequence[Reply]) -> Generator[EpisodeServer]:
    """A server of episodes, while the context is open."""
    with EpisodeServer(replies) as server:
        thread = threading.Thread(target=server.serve_forever, name="conformance-server", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
