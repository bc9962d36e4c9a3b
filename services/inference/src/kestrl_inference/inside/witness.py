"""Names the policy that a request is given to: ASGI middleware inside SGLang's server, behind the guard.

SGLang's answers name no policy; it serves the base model for names that it does not understand in a chat, and an
adapter that was unloaded from its old folder. So this keeps the table of the adapters whose loads and unloads passed
here, refuses every other name, and adds the name to the answer's header. An unload first ends the name, and waits for
the requests that were given to it.

Requests for `/generate` are refused with fields that are not in `FIELDS`, which could choose another policy, and with
token ids outside the vocabulary, which end SGLang's scheduler.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard, cast

from kestrl_inference.inside.guard import Application, Message, Receive, Scope, Send

HEADER = b"x-kestrl-policy"
GENERATE, LOAD, UNLOAD = "/generate", "/load_lora_adapter", "/unload_lora_adapter"
CHATS = ("/v1/chat/completions", "/v1/completions")
FIELDS = frozenset({"input_ids", "lora_path", "return_logprob", "logprob_start_len", "sampling_params", "stream"})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
LARGEST = 64 * 1024 * 1024
"""Largest body of a request in bytes."""


class RequestRefused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WitnessedCall(NamedTuple):
    """A request to sample."""

    policy: str
    adapter: str | None
    """None for the base model."""


class PolicyWitness:
    """The middleware."""

    def __init__(self, app: Application, *, base: Callable[[], str], vocabulary: Callable[[], int]) -> None:
        """Makes it without any adapter.

        Args:
            app: The application behind it.
            base: Name of the base model, asked for when a request comes.
            vocabulary: Number of token ids, asked for likewise.
        """
        self._app, self._base, self._vocabulary = app, base, vocabulary
        self._loaded: set[str] = set()
        self._running: Counter[str] = Counter()
        self._ended = asyncio.Condition()
        self._changing = asyncio.Lock()
        """One load or unload at a time, so that the table changes in the order in which SGLang's own does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "") if scope["type"] == "http" else ""
        handle = {GENERATE: self._sample, LOAD: self._load, UNLOAD: self._unload, **dict.fromkeys(CHATS, self._sample)}
        if path not in handle:
            await self._app(scope, receive, send)
            return
        try:
            content = await body(receive)
            await handle[path](path, document(content), scope, replayed(content, receive), send)
        except RequestRefused as refused:
            await refuse(refused, send)

    async def _sample(self, path: str, request: Mapping[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        if path == GENERATE:
            call = call_of_generate(request, self._base(), self._vocabulary())
        else:
            call = call_of_chat(request, self._base())
        name = call.adapter
        if name is None:
            await self._app(scope, receive, stamped(call.policy, send))
            return
        if name not in self._loaded:
            raise RequestRefused(404, f"the adapter {name} is not loaded")
        self._running[name] += 1  # no await between this and the table, so that an unload counts the request
        try:
            await self._app(scope, receive, stamped(call.policy, send))
        finally:
            async with self._ended:
                self._running[name] -= 1
                if not self._running[name]:
                    del self._running[name]
                self._ended.notify_all()

    async def _load(self, path: str, request: Mapping[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        del path
        name = adapter_name(request, self._base())
        if self._running[name]:
            raise RequestRefused(409, f"requests still run under the adapter {name}, which is being unloaded")

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._loaded.add(name)
            await send(message)

        async with self._changing:
            await self._app(scope, receive, watched)

    async def _unload(self, path: str, request: Mapping[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        del path
        name = adapter_name(request, self._base())
        self._loaded.discard(name)
        async with self._ended:
            await self._ended.wait_for(lambda: not self._running[name])
        async with self._changing:
            self._loaded.discard(name)  # also if a load came first
            await self._app(scope, receive, send)


def call_of_generate(request: Mapping[str, Any], base: str, vocabulary: int) -> WitnessedCall:
    """The policy of a request with token ids. Pure.

    Raises:
        Refused: It has another form than KestRL's.
    """
    unknown = sorted(set(request) - FIELDS)
    if unknown:
        raise RequestRefused(
            400, f"the field {unknown[0]!r} is not allowed here; allowed are {', '.join(sorted(FIELDS))}"
        )
    ids: Any = request.get("input_ids")
    if not _are_ids(ids):
        raise RequestRefused(400, "input_ids must be one list of token ids")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise RequestRefused(400, f"input_ids must be from 0 to {vocabulary - 1}")
    return _call(request.get("lora_path"), base)


def _are_ids(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and {*map(type, cast("list[Any]", ids))} == {int}


def call_of_chat(request: Mapping[str, Any], base: str) -> WitnessedCall:
    """The policy of a request in OpenAI's form: `BASE`, or `BASE:ADAPTER`. Pure.

    Raises:
        Refused: It names another model, or two, or has token ids.
    """
    if "lora_path" in request:
        raise RequestRefused(400, f"name an adapter in the field model, as {base}:ADAPTER")
    if not isinstance(request.get("prompt", ""), str):
        raise RequestRefused(400, f"prompt must be one text; token ids are for {GENERATE}")
    model = request.get("model")
    if not isinstance(model, str) or model.partition(":")[0] != base:
        raise RequestRefused(404, f"the model {str(model)[:100]!r} is not served; write {base} or {base}:ADAPTER")
    return _call(model.partition(":")[2] or None, base)


def _call(adapter: Any, base: str) -> WitnessedCall:
    if adapter is None:
        return WitnessedCall(base, None)
    if not isinstance(adapter, str) or not NAME.fullmatch(adapter):
        raise RequestRefused(400, "the name of the adapter is not valid")
    return WitnessedCall(adapter, adapter)


def adapter_name(request: Mapping[str, Any], base: str) -> str:
    """Name of the adapter that a request loads or unloads. Pure.

    Raises:
        Refused: It is missing, or cannot be in a header, or is that of the base model.
    """
    name = request.get("lora_name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == base:
        raise RequestRefused(
            400, "lora_name must be a name of letters, digits, dots and dashes, and not the base model's"
        )
    return name


def document(content: bytes) -> Mapping[str, Any]:
    """A body that is a JSON object.

    Raises:
        Refused: It is none.
    """
    try:
        parsed: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "the body is not JSON") from error
    if not isinstance(parsed, dict):
        raise RequestRefused(400, "the body is not a JSON object")
    return cast("dict[str, Any]", parsed)


async def body(receive: Receive) -> bytes:
    """The body of a request.

    Raises:
        Refused: It is too large, or its client has gone.
    """
    parts, length = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise RequestRefused(400, "the request ended before its body")
        part = message.get("body", b"")
        length += len(part)
        if length > LARGEST:
            raise RequestRefused(413, f"the body is larger than {LARGEST} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(content: bytes, receive: Receive) -> Receive:
    """Gives a body that was read already to the application, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def stamped(policy: str, send: Send) -> Send:
    """Adds the policy's name to a successful answer."""

    async def stamp(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message.get("headers", []) if pair[0].lower() != HEADER]
            if message["status"] == 200:
                headers.append((HEADER, policy.encode()))
            message = {**message, "headers": headers}
        await send(message)

    return stamp


async def refuse(refused: RequestRefused, send: Send) -> None:
    content = json.dumps({"error": {"message": str(refused), "code": refused.status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
