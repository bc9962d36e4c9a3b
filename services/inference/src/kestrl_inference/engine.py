"""Client of the engine's HTTP API: health, adapters, scoring. Failures are typed, every call has a time limit."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from kestrl.errors import EngineFailure
from kestrl.telemetry import trace_headers

CONTROL_KEY = "KESTRL_ENGINE_CONTROL_KEY"
START_METRIC = "process_start_time_seconds"
LOAD_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
READ_METRICS = frozenset({START_METRIC, *LOAD_METRICS})
CHECK_SECONDS = 15.0
"""Time limit of a health check; an engine that does not answer in time is down. Longer than pauses of a busy server."""

SCORING = {
    "max_tokens": 1,
    "temperature": 1.0,
    "prompt_logprobs": 0,
    "detokenize": False,
    "skip_reading_prefix_cache": True,
}
"""Sampling parameters that make vLLM compute and return the log-probs of a prompt."""


class EngineRefused(EngineFailure):
    """The engine answered with an error status."""

    code = "engine_refused"
    retryable = False

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of an engine."""

    kv_usage: float = 0.0
    """Share of the key-value cache in use, 0 to 1."""
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    """Preemptions since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Result of a health check."""

    healthy: bool
    born: float
    """Unix seconds of the server's start; 0.0 if unknown."""
    adapters: frozenset[str]
    """Names of the loaded adapters."""
    reason: str = ""
    """Why the engine is not healthy."""
    load: Load = Load()


class Engine:
    """Client of one engine on loopback or in the same pod."""

    def __init__(self, url: str, base_model: str, *, timeout: float) -> None:
        self._url, self._base, self._timeout = url.rstrip("/"), base_model, timeout
        key = os.environ.get(CONTROL_KEY, "")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        """The HTTP session, created inside the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, body: Any = None, *, seconds: float | None = None) -> bytes:
        """Sends one request.

        Raises:
            EngineRefused: An answer other than 2xx.
            EngineFailure: No answer: code `engine_unreachable` or `engine_deadline`.
        """
        limit = self._timeout if seconds is None else min(seconds, self._timeout)
        try:
            async with self._client().request(
                method,
                f"{self._url}{path}",
                json=body,
                headers=trace_headers(),
                timeout=aiohttp.ClientTimeout(total=limit),
            ) as response:
                content = await response.read()
                if response.status >= 300:
                    raise EngineRefused(
                        response.status, f"{method} {path}: {response.status}: {content[:500].decode(errors='replace')}"
                    )
                return content
        except TimeoutError as error:
            raise EngineFailure(f"{method} {path}: no answer in {limit:g} s", code="engine_deadline") from error
        except aiohttp.ClientError as error:
            raise EngineFailure(
                f"{method} {path}: {type(error).__name__}: {error}", code="engine_unreachable"
            ) from error

    async def look(self) -> Pulse:
        """Checks health, start time and loaded adapters; does not raise if the engine is down."""
        try:
            await self._call("GET", "/health", seconds=CHECK_SECONDS)
            adapters = await self.adapters(seconds=CHECK_SECONDS)
            values = await self._metrics()
        except EngineFailure as error:
            return Pulse(healthy=False, born=0.0, adapters=frozenset(), reason=str(error))
        return Pulse(
            healthy=True, born=values.get(START_METRIC, 0.0), adapters=frozenset(adapters), load=load_of(values)
        )

    async def _metrics(self) -> dict[str, float]:
        try:
            return read_metrics((await self._call("GET", "/metrics", seconds=CHECK_SECONDS)).decode(errors="replace"))
        except EngineRefused:  # an engine without metrics; a restart is then detected by missing adapters
            return {}

    async def adapters(self, *, seconds: float | None = None) -> dict[str, str]:
        """Loaded adapters: name to folder.

        Raises:
            EngineFailure: No answer, an error status, or an unknown form.
        """
        answer = read_json(await self._call("GET", "/v1/models", seconds=seconds))
        try:
            return {str(model["id"]): str(model["root"]) for model in answer["data"] if model["id"] != self._base}
        except (KeyError, TypeError) as error:
            raise EngineFailure(f"/v1/models has an unknown form: {error!r}", code="engine_nonsense") from error

    async def load(self, name: str, folder: str) -> None:
        """Loads an adapter under a new name; adapters are never replaced in place."""
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload(self, name: str) -> None:
        """Unloads an adapter; an unknown one is not an error. Running requests for it end normally."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except EngineRefused as error:
            if error.status != 404:
                raise

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, at temperature 1, without a prefix cache.

        Raises:
            EngineFailure: The answer is not one finite number for each token (code `engine_nonsense`).
        """
        body = {"model": model, "token_ids": list(token_ids), "sampling_params": SCORING}
        answer = read_json(await self._call("POST", "/inference/v1/generate", body))
        scores = prompt_scores(answer.get("prompt_logprobs"), token_ids)
        if not all(math.isfinite(value) for value in scores):
            raise EngineFailure(f"{model}: the engine answered a log-prob that is not finite", code="engine_nonsense")
        return scores


def read_json(content: bytes) -> Mapping[str, Any]:
    """Parses an answer as a JSON object.

    Raises:
        EngineFailure: It is not one (code `engine_nonsense`).
    """
    try:
        value = json.loads(content)
    except ValueError as error:
        raise EngineFailure(f"not JSON: {content[:200]!r}", code="engine_nonsense") from error
    if not isinstance(value, dict):
        raise EngineFailure(f"not a JSON object: {content[:200]!r}", code="engine_nonsense")
    return cast("Mapping[str, Any]", value)


def prompt_scores(listed: Any, token_ids: Sequence[int]) -> list[float]:
    """Scores in vLLM's answer: null for the first token, then one object of candidates by token id per position.

    Raises:
        EngineFailure: It has another form (code `engine_nonsense`).
    """
    try:
        if len(listed) != len(token_ids):
            raise ValueError(f"{len(listed)} positions for {len(token_ids)} tokens")
        return [
            float(position[str(token)]["logprob"]) for position, token in zip(listed[1:], token_ids[1:], strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFailure(f"prompt_logprobs have an unknown form: {error!r}", code="engine_nonsense") from error


def read_metrics(page: str) -> dict[str, float]:
    """Values of the used metrics on a Prometheus page, summed over labels."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in READ_METRICS:
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


def load_of(values: Mapping[str, float]) -> Load:
    """Load from metrics; missing ones are 0."""
    kv, running, waiting, preemptions = (values.get(name, 0.0) for name in LOAD_METRICS)
    return Load(kv_usage=kv, running=int(running), waiting=int(waiting), preemptions=int(preemptions))


async def until(deadline: float, event: asyncio.Event) -> bool:
    """Waits for an event with a time limit; returns whether it was set."""
    try:
        async with asyncio.timeout(deadline):
            await event.wait()
    except TimeoutError:
        return False
    return True
