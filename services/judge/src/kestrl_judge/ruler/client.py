"""Requests to one judge model through the `openai` client: retried, paced, and with typed failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum, StrEnum
from typing import Any, Protocol

from kestrl._shared.credentials import header_value
from kestrl._shared.plan.settings.judge import JudgeModel
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl._shared.user_secrets import PresentRedactor, user_secret
from kestrl.engines import DRAINING
from kestrl.errors import described
from kestrl_judge.ruler.completion import JudgeReply, read_reply
from kestrl_judge.ruler.pacing import Pacer, pause_before, retry_after
from kestrl_judge.ruler.servers import Servers

ATTEMPTS = 6
"""Attempts of one request, within the time limit of its group."""
UNAUTHORIZED = 401
ROTATION_PAUSE = 15.0
"""Seconds between attempts with a key that the server does not accept any more: the file of a rotated one follows its
Secret within about a minute."""
TOO_MANY_REQUESTS = 429
RETRIED = frozenset({408, 409, 425, TOO_MANY_REQUESTS, 500, 502, 503, 504, 529})
NOT_CONNECTED = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol"})
"""Exceptions of the HTTP client before anything was sent."""
NOT_COMPRESSED = {"Accept-Encoding": "identity"}
NO_KEY = "none"
"""API key sent to servers that need none; the client requires one."""


class NoScoresReason(StrEnum):
    """Why a judge gave no scores."""

    MALFORMED = "malformed"
    """Its replies did not fit the schema."""
    UNAVAILABLE = "unavailable"
    """It could not be reached, or answered 429 or 5xx, until the attempts were used up."""
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """It refused the request: a wrong key, model or parameter."""
    UNAUTHORIZED = "unauthorized"
    """It accepts a key no more that it has accepted before."""
    TOO_LARGE = "too_large"
    """The prompt does not fit the model's context."""
    BUDGET = "budget"
    """The budget of the run is used up."""


class NoScores(Exception):
    """A judge gave no scores."""

    def __init__(self, reason: NoScoresReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Meter(Protocol):
    """What a request's use is reported to; see `budget.MeteredRequest`."""

    def answered(self, reply: JudgeReply) -> None: ...

    def refused(self) -> None: ...

    def unsent(self) -> None: ...


class JudgeClient:
    """Client of one judge model, at one or several equal servers."""

    def __init__(self, judge: JudgeModel, *, concurrency: int, request_seconds: float) -> None:
        # Imported here: the client takes half a second and 40 MB, which jobs without a judge model save.
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        from kestrl._shared.bounded_answers import bound

        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
        self.judge = judge
        header_value(self._key(), judge.key_variable or "")
        self._redactor = PresentRedactor(lambda: [self._key()])
        self._accepted = False
        """Whether the server has answered a request."""
        self.refusal = ""
        """How the server refuses the key that it has accepted before; empty while it accepts it."""
        self.pacer = Pacer(concurrency)
        self._servers = Servers(judge.base_urls)
        self._client = AsyncOpenAI(
            base_url=judge.base_urls[0],  # replaced for each request
            api_key=self._present_key,
            max_retries=0,
            timeout=request_seconds,
            default_headers=NOT_COMPRESSED,
            http_client=DefaultAsyncHttpxClient(event_hooks={"response": [bound]}),
        )

    def _key(self) -> str:
        return (user_secret(self.judge.key_variable) or "") if self.judge.key_variable else ""

    async def _present_key(self) -> str:
        """The key of a request: it may have been rotated since the last."""
        return self._key() or NO_KEY

    async def close(self) -> None:
        await self._client.close()

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        metered: Callable[[], AbstractContextManager[Meter]],
    ) -> JudgeReply:
        """The reply to messages.

        Args:
            messages: The conversation.
            options: Further parameters of the request.
            metered: The context of every request that is sent; it raises NoScores where the budget allows none.

        Raises:
            NoScores: The server refused, or could not be reached in `ATTEMPTS` attempts.
        """
        attempt = 0
        while True:
            try:
                async with self.pacer.slot():
                    with metered() as meter:
                        reply = await self._metered(meter, messages, options)
                self.pacer.answered()
                return reply
            except _Retried as error:
                attempt += 1
                pause = pause_before(attempt, error.asked)
                if error.paced:
                    self.pacer.refused(pause)
                if attempt == ATTEMPTS:
                    raise NoScores(error.reason, f"{error} ({attempt} attempts)") from error
                if not error.paced:  # otherwise the pacer pauses every request
                    await asyncio.sleep(pause)

    async def _metered(
        self, meter: Meter, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> JudgeReply:
        try:
            reply = await self._once(messages, options)
        except NoScores:
            meter.refused()
            raise
        except _Retried as error:
            if error.sent is Sent.NO:
                meter.unsent()
            elif error.sent is Sent.REFUSED:
                meter.refused()
            raise
        meter.answered(reply)
        return reply

    async def _once(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> JudgeReply:
        import openai

        from kestrl._shared.bounded_answers import AnswerTooLong

        url = await self._servers.next()
        if url is None:
            names = ", ".join(self.judge.base_urls)
            raise _Retried(NoScoresReason.UNAVAILABLE, f"there is no server behind {names}", sent=Sent.NO)
        client = self._client.with_options(base_url=url)
        with span(SpanName.JUDGE_CALL, {Attr.MODEL: self.judge.model}) as current:
            try:
                create: Any = client.chat.completions.with_raw_response.create
                answer: Any = await create(model=self.judge.model, messages=list(messages), **options)
                self._accepted, self.refusal = True, ""
                reply = read_reply(answer.http_response.content)
            except openai.APITimeoutError as error:
                raise _Retried(
                    NoScoresReason.TIMEOUT, f"no answer from {client.base_url} within its time limit"
                ) from error
            except openai.APIConnectionError as error:
                cause = error.__cause__ or error
                # Other failures of a connection may come after the request, which then may be answered and billed.
                sending = Sent.NO if type(cause).__name__ in NOT_CONNECTED else Sent.PERHAPS
                if sending is Sent.NO:
                    self._servers.unreachable(url)
                reason = self._redactor.text(f"{client.base_url} cannot be reached: {described(cause)}")
                raise _Retried(NoScoresReason.UNAVAILABLE, reason, sent=sending) from error
            except openai.APIStatusError as error:
                if error.type == DRAINING:
                    self._servers.unreachable(url)
                raise self._of_status(error) from error
            except (openai.APIError, AnswerTooLong, ValueError) as error:  # an answer that is not a completion
                reason = self._redactor.text(f"unusable answer of {client.base_url}: {described(error)}")
                raise _Retried(NoScoresReason.UNAVAILABLE, reason) from error
            reply = replace(
                reply,
                content=self._redactor.text(reply.content),
                finish_reason=self._redactor.text(reply.finish_reason),
            )
            current.set_attributes({Attr.INPUT_TOKENS: reply.input_tokens, Attr.OUTPUT_TOKENS: reply.output_tokens})
            return reply

    def _of_status(self, error: Any) -> Exception:
        """The failure for an answer with an error status."""
        status: int = error.status_code
        message = f"status {status}: {self._redactor.text(str(error.message))[:300]}"
        if status in RETRIED:
            pause = 0.0 if error.type == DRAINING else retry_after(error.response.headers)
            paced = status == TOO_MANY_REQUESTS
            return _Retried(NoScoresReason.UNAVAILABLE, message, asked=pause, paced=paced, sent=Sent.REFUSED)
        if status == UNAUTHORIZED and self._accepted and self._key():
            self.refusal = message
            rotated = error.request.headers.get("Authorization") != f"Bearer {self._key()}"
            return _Retried(
                NoScoresReason.UNAUTHORIZED, message, asked=0.0 if rotated else ROTATION_PAUSE, sent=Sent.REFUSED
            )
        text = message.lower()
        too_large = error.code == "context_length_exceeded" or (
            "context" in text and any(word in text for word in ("length", "token", "window"))
        )
        return NoScores(NoScoresReason.TOO_LARGE if too_large else NoScoresReason.REFUSED, message)


class Sent(Enum):
    """What became of a request that has no usable answer."""

    NO = "no"
    """The server was not reached."""
    REFUSED = "refused"
    """It answered with an error."""
    PERHAPS = "perhaps"
    """It may have been answered, and then is paid for."""


class _Retried(Exception):
    """A failed attempt after which another one may succeed."""

    def __init__(
        self,
        reason: NoScoresReason,
        message: str,
        *,
        asked: float | None = None,
        paced: bool = False,
        sent: Sent = Sent.PERHAPS,
    ) -> None:
        super().__init__(message)
        self.reason, self.asked, self.paced, self.sent = reason, asked, paced, sent
