"""A fake inference engine with vLLM's HTTP API: deterministic, token exact, scriptable.

A real HTTP server on loopback, without a model. Its "samples" are a hash of (weights, prefix, seed), and so are the
log-probabilities: scoring a sequence through `prompt_logprobs` gives the very numbers that generating it gave, another
adapter gives others, and the same adapter under another name gives the same. A script decides otherwise where a test
wants it to:

    async with FakeEngine(script=lambda prompt: Completion(token_ids=[5, 6, 2])) as engine:
        await client.post(engine.url + "/inference/v1/generate", ...)
        assert engine.prompts[0].token_ids == [...]
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from tests.fakes.ports import free_port

from kestrl.episode import BASE_MODEL_NAME

__all__ = ["Completion", "FakeEngine", "Fault", "Prompt", "score"]

ACCEPTING_TURNS = 5
"""Turns of asyncio's loop after which an accepted connection has its handler: it takes three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A received generate request."""

    model: str
    token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    headers: Mapping[str, str]
    index: int
    """Requests received before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer."""

    token_ids: Sequence[int]
    finish_reason: str = "stop"
    """Set to `length` automatically if `max_tokens` cuts the completion."""
    logprobs: Sequence[float] | None = None
    """None: the hash of weights and prefix, see `score`."""
    model: str | None = None
    """Name of the model in the answer; None means the requested one."""
    after: asyncio.Event | None = None
    """Event to await before answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure instead of an answer."""

    status: int | None = None
    """An HTTP status; None drops the connection without an answer."""
    message: str = "the fake engine is configured to fail"
    body: str | None = None
    """Sent instead of vLLM's error object."""


Script = Callable[[Prompt], Completion | Fault | Awaitable[Completion | Fault]]


def score(weights: str, token_ids: Sequence[int]) -> list[float]:
    """The fake's log-probability of every token given those before it, all in (-4, 0).

    Args:
        weights: Digest of the adapter's weights, as `FakeEngine.weights` gives; empty for the base model.
        token_ids: The sequence.
    """
    state, scores = hashlib.blake2b(weights.encode(), digest_size=8).digest(), list[float]()
    for token in token_ids:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()
        scores.append(-4.0 * (int.from_bytes(state, "little") + 1) / (2**64 + 2))
    return scores


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "FakeEngineError", "param": None, "code": status}}
    return web.json_response(body, status=status)


@dataclass(kw_only=True)
class FakeEngine:
    """The server. `async with` starts it on a free port of 127.0.0.1."""

    script: Script | None = None
    base_model: str = BASE_MODEL_NAME
    key: str | None = None
    """Bearer token asked for under /v1 and /inference."""
    control_key: str | None = None
    """Bearer token asked for on the LoRA routes instead of `key`, when set."""
    context_length: int = 4096
    vocab_size: int = 1000
    eos_id: int = 2
    max_rank_error: bool = False
    """Whether loading an adapter fails as for a rank above `--max-lora-rank`."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """Loaded adapters: name to folder."""
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    """Every generate request received, in order."""
    healthy: bool = True
    turns: int | None = None
    """Running turns as the guard of its server counts them; None for a server without a guard."""
    drains: int = 0
    """Requests to drain that it has received."""
    health_headers: dict[str, str] = field(default_factory=dict[str, str])
    asleep: bool = False
    """Whether it has given its memory up; a request that needs it then fails as a dead engine core does."""
    sleeps: list[str] = field(default_factory=list[str])
    """Sleeps and wakes, in order."""
    aborted_tokens: int | None = 3
    """Tokens that an aborted request has; None for a server without the route."""
    can_sleep: bool = True
    move_seconds: float = 0.0
    """Time in which it moves its weights to and from host memory."""
    wakes: bool = True
    """Whether it wakes when it answers that it does."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Its guard was asked to end it."""
    disturbed: list[str] = field(default_factory=list[str])
    """Requests that needed its memory while it slept."""
    version: str = "0.32.0"
    metrics: str | None = None
    """Page of metrics; without one it answers 404."""
    port: int = 0
    _answering: dict[str, asyncio.Future[Completion | Fault]] = field(
        default_factory=dict[str, "asyncio.Future[Completion | Fault]"]
    )
    """Answers that are under way, by the id that the server gives a request."""
    _runner: web.AppRunner | None = None
    _listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it listens."""
        return self._runner is not None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; on the former port after a `stop`."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.aborted_tokens is not None:
            app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/kestrl/drain", self._drain)
        app.router.add_post("/kestrl/resume", self._drain)
        app.router.add_post("/kestrl/end", self._end)
        if self.can_sleep:
            app.router.add_post("/sleep", self._sleep)
            app.router.add_post("/wake_up", self._wake)
            app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        # As in vLLM, a request whose client has disconnected is aborted. (0 would mean no timeout.)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        self.port = self.port or free_port()  # nobody takes it between a stop and a start
        self._listener = socket.create_server(("127.0.0.1", self.port))
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self) -> None:
        """Stops like a crash: open requests lose their connection, and loaded adapters are lost, as in vLLM."""
        if self._runner is not None:
            assert self._listener is not None
            # A connection that was accepted last gets its handler some turns of the loop later. One whose listener is
            # closed before stays open and is never answered (https://github.com/python/cpython/issues/109564).
            asyncio.get_running_loop().remove_reader(self._listener)
            for _ in range(ACCEPTING_TURNS):
                await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = self._listener = None
        self.adapters.clear()
        self.asleep = False

    def weights(self, model: str) -> str | None:
        """Digest of the weights of `model`: empty for the base model, None for an unknown model.

        The bytes of `adapter_model.safetensors` decide, so a copy in another folder is the same policy.
        """
        if model == self.base_model:
            return ""
        if model not in self.adapters:
            return None
        weights = Path(self.adapters[model]) / "adapter_model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else model

    def sample(self, prompt: Prompt) -> Completion:
        """Answer without a script: tokens from a hash, ended by `eos_id` or `max_tokens`."""
        given = prompt.sampling
        greedy = given.get("temperature", 1.0) == 0 or given.get("top_k") == 1 or given.get("top_p", 1.0) < 1e-3
        seed = f"{self.weights(prompt.model)}|{0 if greedy else prompt.sampling.get('seed')}|{list(prompt.token_ids)}"
        state, token_ids = seed.encode(), list[int]()
        limit = int(prompt.sampling.get("max_tokens") or 16)
        stops = {self.eos_id, *prompt.sampling.get("stop_token_ids", ())}
        while len(token_ids) < limit:
            state = hashlib.blake2b(state, digest_size=8).digest()
            token = int.from_bytes(state, "little") % self.vocab_size
            token_ids.append(token)
            if token in stops:
                return Completion(token_ids=token_ids, finish_reason="stop")
        return Completion(token_ids=token_ids, finish_reason="length")

    def scores(self, weights: str, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token given those before it, under some weights."""
        return score(weights, token_ids)

    def _refusal(self, request: web.Request, key: str | None) -> web.Response | None:
        if key is None:
            return None
        sent = request.headers.get("Authorization", "")
        if hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request, self.key) or self._needs_memory(request):
            return refusal
        body = await request.json()
        model = body.get("model") or self.base_model
        prompt = Prompt(
            model=model,
            token_ids=list(body["token_ids"]),
            sampling=dict(body.get("sampling_params") or {}),
            headers=dict(request.headers),
            index=len(self.prompts),
        )
        self.prompts.append(prompt)
        if self.weights(model) is None:
            return _error(404, f"The model `{model}` does not exist.")
        if len(prompt.token_ids) >= self.context_length:
            return _error(400, f"prompt of {len(prompt.token_ids)} tokens exceeds {self.context_length}")
        name = f"generate-tokens-{body.get('request_id', prompt.index)}"
        self._answering[name] = answering = asyncio.ensure_future(self._answer(prompt))
        try:
            answer = await answering
        except asyncio.CancelledError:
            if self._answering.get(name) is answering:
                raise  # the client has gone
            tokens = list(self.sample(prompt).token_ids)[: self.aborted_tokens]
            answer = Completion(token_ids=tokens, finish_reason="abort")
        finally:
            self._answering.pop(name, None)
        if isinstance(answer, Fault):
            return self._fail(request, answer)
        return web.json_response(self._response(prompt, answer))

    async def _answer(self, prompt: Prompt) -> Completion | Fault:
        answer = self.sample(prompt) if self.script is None else self.script(prompt)
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Completion) and answer.after is not None:
            await answer.after.wait()
        return answer

    async def _abort(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.key):
            return refusal
        for name in (await request.json())["request_ids"]:
            if name in self._answering:
                self._answering.pop(name).cancel()
        return web.Response()

    def _fail(self, request: web.Request, fault: Fault) -> web.Response:
        if fault.status is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.body is not None:
            return web.Response(status=fault.status, text=fault.body, content_type="application/json")
        return _error(fault.status, fault.message)

    def _response(self, prompt: Prompt, answer: Completion) -> dict[str, Any]:
        room = self.context_length - len(prompt.token_ids)
        limit = min(int(prompt.sampling.get("max_tokens") or room), room)
        token_ids = list(answer.token_ids)[:limit]
        finish = answer.finish_reason if len(token_ids) == len(answer.token_ids) else "length"
        weights = self.weights(prompt.model) or ""
        scores = self.scores(weights, [*prompt.token_ids, *token_ids])
        logprobs = list(scores[len(prompt.token_ids) :] if answer.logprobs is None else answer.logprobs)
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(token_ids, logprobs, strict=False)
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": token_ids,
            "logprobs": {"content": content} if "logprobs" in prompt.sampling else None,
        }
        count = len(prompt.token_ids)
        return {
            "request_id": f"generate-tokens-{prompt.index}",
            "model": answer.model or prompt.model,
            "output_mode": "tokens",
            "choices": [choice],
            "usage": {
                "prompt_tokens": count,
                "completion_tokens": len(token_ids),
                "total_tokens": count + len(token_ids),
            },
            "prompt_logprobs": _prompt_logprobs(prompt, scores) if "prompt_logprobs" in prompt.sampling else None,
        }

    async def _load(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key) or self._needs_memory(request):
            return refusal
        body = await request.json()
        name, folder = str(body["lora_name"]), Path(body["lora_path"])
        if name == self.base_model:
            return _error(400, f"The lora adapter '{name}' has the name of the base model.")
        if name in self.adapters and not body.get("load_inplace"):
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_config.json").is_file():
            return _error(404, f"No adapter found for {folder}")
        if self.max_rank_error:
            return _error(500, "LoRA rank is greater than max_lora_rank.")
        self.adapters[name] = str(folder)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key) or self._needs_memory(request):
            return refusal
        name = str((await request.json())["lora_name"])
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _drain(self, request: web.Request) -> web.Response:
        if self.turns is None:
            return _error(404, "Not Found")
        if refusal := self._refusal(request, self.control_key or self.key):
            return refusal
        self.drains += 1
        return web.json_response({"running": self.turns})

    async def _sleep(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key):
            return refusal
        assert dict(request.query) == {"level": "1", "mode": "wait"}
        await asyncio.sleep(self.move_seconds)
        self.asleep = True
        self.sleeps.append("sleep")
        return web.json_response({"status": "sleeping", "level": 1})

    async def _wake(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key):
            return refusal
        await asyncio.sleep(self.move_seconds)
        self.asleep = self.asleep and not self.wakes
        self.sleeps.append("wake")
        return web.json_response({"status": "awake", "tags": None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key):
            return refusal
        return web.json_response({"is_sleeping": self.asleep})

    async def _end(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.control_key or self.key):
            return refusal
        self.ended.set()
        self.healthy = False
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _needs_memory(self, request: web.Request) -> web.Response | None:
        if not self.asleep:
            return None
        self.disturbed.append(request.path)
        return _error(500, "EngineDeadError")

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, self.key):
            return refusal
        base = {"id": self.base_model, "object": "model", "root": self.base_model, "parent": None}
        loaded = [
            {"id": name, "object": "model", "root": folder, "parent": self.base_model}
            for name, folder in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": [base, *loaded]})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return _error(404, "there are no metrics") if self.metrics is None else web.Response(text=self.metrics)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503, headers=self.health_headers)


def _prompt_logprobs(prompt: Prompt, scores: Sequence[float]) -> list[dict[str, Any] | None]:
    """In vLLM's form: null for the first token, then one object per token, keyed by token id."""
    rest = zip(prompt.token_ids[1:], scores[1:], strict=False)
    return [None, *({str(token): {"logprob": value, "rank": 1, "decoded_token": None}} for token, value in rest)]
