"""A scripted chat model: a real HTTP server with the chat completions of an OpenAI-compatible endpoint, tools included.

    with ScriptedChat(lambda request: {"content": "42"}) as chat:
        ...  # OpenAI(base_url=chat.url, api_key="key")

A script gets the request's JSON and returns the message, `{"content": ...}` or `{"tool_calls": [(name, arguments)]}`,
an HTTP status to fail with, or the bytes of an answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Script = Callable[[Mapping[str, Any]], Mapping[str, Any] | int | bytes]


class ScriptedChat:
    """The server, on a free port of loopback."""

    def __init__(self, script: Script) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.keys: set[str] = set()
        chat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                chat.requests.append(body)
                chat.keys.add(self.headers["authorization"])
                answer = script(body)
                status = answer if isinstance(answer, int) else 200
                content = answer if isinstance(answer, bytes) else json.dumps(_reply(body, answer)).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Base URL, with /v1."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _reply(request: Mapping[str, Any], answer: Mapping[str, Any] | int) -> dict[str, Any]:
    return {"error": {"message": "scripted"}} if isinstance(answer, int) else completion(request, answer)


def completion(request: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion with a message."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        for index, (name, arguments) in enumerate(message.get("tool_calls", ()))
    ]
    answer = {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": answer, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
