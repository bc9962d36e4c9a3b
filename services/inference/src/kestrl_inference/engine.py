"""Client of the engine's HTTP API: health, adapters, scoring. Failures are typed, every call has a time limit, and the
dialect of the engine has the requests and reads the answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import aiohttp

from kestrl._shared.plan.settings.inference import LEAST_MOVE_SECONDS
from kestrl._shared.telemetry import trace_headers
from kestrl.engines import POLICY_HEADER, EngineDialect, Generate, Generated, Load, Metrics, Request, SleepRoutes, Work
from kestrl.errors import EngineFailure
from kestrl.redaction import Redactor
from kestrl_inference.inside.drain import ANSWER_SECONDS
from kestrl_inference.inside.guard import DRAIN, END, IDLE_HEADER, RESUME

Read = TypeVar("Read")
SEED = 7
"""Seed of the token that a proof samples."""
JSON = {"content-type": "application/json"}
CONTROL_KEY = "KESTRL_ENGINE_CONTROL_KEY"
BUSY = "engine_deadline"
"""Code of the failure of an engine that does not answer in time."""
CHECK_SECONDS = 15.0
"""Time limit of a health check; an engine that does not answer in time is down. Longer than pauses of a busy server."""


class EngineRefused(EngineFailure):
    """The engine answered with an error status."""

    code = "engine_refused"
    retryable = False

    def __init__(self, status: int, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.answer = status, answer


class IdleSeconds(NamedTuple):
    """Seconds without a request, as an engine's guard counts them."""

    idle: float
    observed: float
    """Seconds since the server's start."""


def idle_seconds(header: str | None) -> IdleSeconds | None:
    """The count in the guard's header; None without one, or if it is malformed."""
    try:
        idle, observed = map(float, (header or "").split())
    except ValueError:
        return None
    return IdleSeconds(idle, observed) if 0 <= idle <= observed < math.inf else None


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
    load: Load = field(default_factory=Load)
    work: Work = field(default_factory=Work)
    idle: IdleSeconds | None = None
    """None if the engine's server does not count them."""


class Engine:
    """Client of one engine on loopback or in the same pod.

    Args:
        url: Of its server.
        base_model: Name under which it serves the base model.
        dialect: Its dialect.
        timeout: Time limit of a call in seconds.
        move_seconds: Time limit of a sleep and of a wake-up, which move its weights.
    """

    def __init__(
        self,
        url: str,
        base_model: str,
        dialect: EngineDialect,
        *,
        timeout: float,
        move_seconds: float = LEAST_MOVE_SECONDS,
    ) -> None:
        self._url, self._base, self._timeout = url.rstrip("/"), base_model, timeout
        self._move_seconds = move_seconds
        self.dialect = dialect
        key = os.environ.get(CONTROL_KEY, "")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._redactor = Redactor([key])
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        """The HTTP session, created inside the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, request: Request, *, seconds: float | None = None, moves: bool = False) -> bytes:
        """Body of the answer to one request; arguments and what is raised as of `_answer`."""
        return (await self._answer(request, seconds=seconds, moves=moves))[0]

    async def _answer(
        self, request: Request, *, seconds: float | None = None, moves: bool = False
    ) -> tuple[bytes, Mapping[str, str]]:
        """Sends one request; returns the answer's body and headers.

        Args:
            request: What is sent.
            seconds: A time limit below that of every call.
            moves: Whether the engine moves its weights before it answers.

        Raises:
            EngineRefused: An answer other than 2xx.
            EngineFailure: No answer: code `engine_unreachable` or `BUSY`.
        """
        longest = self._move_seconds if moves else self._timeout
        limit = longest if seconds is None else min(seconds, longest)
        call = f"{request.method} {request.path}"
        try:
            async with self._client().request(
                request.method,
                f"{self._url}{request.path}",
                data=request.body or None,
                headers={**trace_headers(), **(JSON if request.body else {})},
                timeout=aiohttp.ClientTimeout(total=limit),
            ) as response:
                content = await response.read()
                if response.status >= 300:
                    excerpt = self._redactor.text(content[:2000].decode(errors="replace"))[:500]
                    message = f"{call}: {response.status}: {excerpt}"
                    raise EngineRefused(response.status, message, content)
                return content, response.headers
        except TimeoutError as error:
            raise EngineFailure(f"{call}: no answer in {limit:g} s", code=BUSY) from error
        except aiohttp.ClientError as error:
            raise EngineFailure(f"{call}: {type(error).__name__}: {error}", code="engine_unreachable") from error

    async def look(self) -> Pulse:
        """Checks health, start time and loaded adapters; does not raise if the engine is down."""
        try:
            _, headers = await self._answer(self.dialect.health, seconds=CHECK_SECONDS)
            adapters = await self.adapters(seconds=CHECK_SECONDS)
            metrics = await self._metrics()
        except EngineFailure as error:
            return Pulse(healthy=False, born=0.0, adapters=frozenset(), reason=str(error))
        idle = idle_seconds(headers.get(IDLE_HEADER.decode()))
        return Pulse(
            healthy=True,
            born=metrics.born,
            adapters=frozenset(adapters),
            load=metrics.load,
            work=metrics.work,
            idle=idle,
        )

    async def _metrics(self) -> Metrics:
        try:
            page = await self._call(self.dialect.metrics, seconds=CHECK_SECONDS)
        except EngineRefused:  # an engine without metrics; a restart is then detected by missing adapters
            return Metrics(0.0, Load())
        return _read(lambda: self.dialect.read_metrics(page.decode(errors="replace")))

    async def adapters(self, *, seconds: float | None = None) -> dict[str, str]:
        """Loaded adapters: name to folder.

        Raises:
            EngineFailure: No answer, an error status, or an unknown form.
        """
        answer = await self._call(self.dialect.adapters, seconds=seconds)
        return _read(lambda: self.dialect.read_adapters(answer, self._base))

    async def load(self, name: str, folder: str) -> None:
        """Loads an adapter under a new name; adapters are never replaced in place."""
        await self._call(self.dialect.load(name, folder))

    async def unload(self, name: str) -> None:
        """Unloads an adapter; an unknown one is not an error. Running requests for it end normally."""
        try:
            await self._call(self.dialect.unload(name))
        except EngineRefused as error:
            if not self.dialect.is_unknown_adapter(error.status, error.answer):
                raise

    async def drain(self) -> int:
        """Has the guard of the engine's server refuse new requests of others for a while; returns the running ones.

        Raises:
            EngineFailure: No engine answers, or none with a guard that can.
        """
        answer = await self._call(Request(*DRAIN), seconds=ANSWER_SECONDS)
        return _read(lambda: int(json.loads(answer)["running"]))

    async def resume(self) -> None:
        """Has the guard let requests of others in again.

        Raises:
            EngineFailure: No engine answers, or none with a guard that can.
        """
        await self._call(Request(*RESUME), seconds=ANSWER_SECONDS)

    async def end(self) -> None:
        """Ends the engine's server at once, which then cannot answer.

        Raises:
            EngineFailure: It goes on.
        """
        try:
            await self._call(Request(*END), seconds=ANSWER_SECONDS)
        except EngineFailure as error:
            if error.code != "engine_unreachable":
                raise

    async def sleep(self) -> None:
        """Has the engine give its device's memory up, and keep its weights in host memory.

        Raises:
            EngineRefused: It cannot sleep.
            EngineFailure: No answer.
        """
        await self._call(self._sleep_routes().sleep, moves=True)

    async def wake(self) -> None:
        """Has the engine take its memory again. Raises what `sleep` does."""
        await self._call(self._sleep_routes().wake, moves=True)

    async def sleeping(self) -> bool:
        """Whether the engine sleeps. Raises what `sleep` does."""
        answer = await self._call(self._sleep_routes().state, seconds=CHECK_SECONDS)
        return _read(lambda: bool(json.loads(answer)["is_sleeping"]))

    def _sleep_routes(self) -> SleepRoutes:
        if self.dialect.sleep_routes is None:
            raise EngineFailure(f"{self.dialect.name} cannot sleep", code="engine_cannot_sleep", retryable=False)
        return self.dialect.sleep_routes

    async def version(self) -> str:
        """Version of the engine, or `unknown` if it does not say."""
        try:
            answer = await self._call(self.dialect.version, seconds=CHECK_SECONDS)
            return _read(lambda: self.dialect.read_version(answer))
        except EngineFailure:
            return "unknown"

    async def sample(self, model: str, token_ids: Sequence[int], *, seed: int = SEED, max_tokens: int = 1) -> Generated:
        """Samples with a seed at temperature 1, as rollout workers do.

        Raises:
            EngineFailure: The answer has an unknown form or names another policy (code `engine_nonsense`). The message
                has the engine's version and the field.
        """
        answer, headers = await self._answer(
            self.dialect.generate(
                Generate(
                    id=f"proof/{model}",
                    policy=model,
                    prompt_ids=token_ids,
                    temperature=1.0,
                    max_tokens=max_tokens,
                    seed=seed,
                    stop_token_ids=(),
                )
            )
        )
        try:
            generated = _read(lambda: self.dialect.read_generated(answer, headers.get(POLICY_HEADER)))
            problem = _unfit(model, generated, max_tokens)
        except EngineFailure as error:
            generated, problem = None, str(error)
        if generated is None or problem:
            build = f"{self.dialect.name} {await self.version()}"
            raise EngineFailure(
                f"{build} answers a generation in a form that is not known: {problem}",
                code="engine_nonsense",
                retryable=False,
            )
        return generated

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, at temperature 1, without a prefix cache.

        Raises:
            EngineFailure: The answer is not one finite number for each token (code `engine_nonsense`).
        """
        answer = await self._call(self.dialect.score(model, token_ids))
        scores = _read(lambda: self.dialect.read_scores(answer, token_ids))
        if not all(math.isfinite(value) for value in scores):
            raise EngineFailure(f"{model}: the engine answered a log-prob that is not finite", code="engine_nonsense")
        return scores


def _unfit(model: str, generated: Generated, limit: int) -> str:
    """What contradicts the request for some tokens; empty if nothing does."""
    if generated.policy != model:
        return f"it names the policy {generated.policy!r} where {model!r} was asked for"
    count = len(generated.token_ids)
    if not 1 <= count <= limit or len(generated.logprobs) != count:
        expected = "one" if limit == 1 else f"1 to {limit}"
        return f"{count} tokens with {len(generated.logprobs)} log-probs for {expected}"
    return "" if all(map(math.isfinite, generated.logprobs)) else "its log-prob is not finite"


def _read(reading: Callable[[], Read]) -> Read:
    """An answer read by the dialect.

    Raises:
        EngineFailure: It has an unknown form (code `engine_nonsense`).
    """
    try:
        return reading()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise EngineFailure(str(error), code="engine_nonsense") from error


async def until(deadline: float, event: asyncio.Event) -> bool:
    """Waits for an event with a time limit; returns whether it was set."""
    try:
        async with asyncio.timeout(deadline):
            await event.wait()
    except TimeoutError:
        return False
    return True
