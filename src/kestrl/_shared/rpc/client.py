"""Client calls with deadline, trace context and credential; failures are typed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from opentelemetry.propagate import inject

from kestrl._shared.rpc.status import TOKEN_KEY, failure_of, went_away
from kestrl.errors import FailureError
from kestrl.redaction import Redactor

Channel = grpc.aio.Channel
Reply = TypeVar("Reply")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def channel(address: str, *, largest_answer: int = MAX_MESSAGE_BYTES) -> Channel:
    """A channel to `host:port`, which connects on first use and reconnects automatically.

    Args:
        address: `host:port`.
        largest_answer: Maximum size of an answer in bytes.
    """
    # grpc uses the first value of a repeated option.
    options = [("grpc.max_receive_message_length", largest_answer), *OPTIONS]
    return grpc.aio.insecure_channel(address, options=options)


def shown(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata with a credential."""
    return ((TOKEN_KEY, token),) if token else ()


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    carrier: dict[str, str] = {}
    inject(carrier)
    return (*carrier.items(), *shown(token))


async def connected(channel: Channel, *, seconds: float) -> bool:
    """Whether the server of a channel becomes reachable within the given time."""
    try:
        async with asyncio.timeout(seconds):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


async def call(
    method: Callable[..., Any],
    request: object,
    reply: type[Reply],
    *,
    timeout: float,
    peer: str,
    wait: bool = False,
    token: str | None = None,
) -> Reply:
    """Makes one unary call.

    Args:
        method: Method of a stub.
        request: Request message.
        reply: Class of the answer.
        timeout: Seconds until the call fails with code `deadline_exceeded`.
        peer: Name of the server for messages, such as `tools`.
        wait: Whether to wait for a server that is not up, and to retry when it goes away, until the timeout. Only for
            idempotent calls.
        token: Credential for the server; None sends none.

    Raises:
        FailureError: The call failed; has the server's failure, or one derived from the status.
    """
    ends = time.monotonic() + timeout
    while True:
        seconds_left = max(0.0, ends - time.monotonic())
        try:
            answer = await method(request, timeout=seconds_left, metadata=_metadata(token), wait_for_ready=wait)
        except grpc.aio.AioRpcError as error:
            if wait and seconds_left > 0 and went_away(error):
                continue
            raise _failed(error, peer, token) from error
        assert isinstance(answer, reply)
        return answer


def _failed(error: grpc.aio.AioRpcError, peer: str, token: str | None) -> FailureError:
    """The failure of a call, without the credential that the server was sent."""
    failure = failure_of(error, peer=peer)
    return FailureError(replace(failure, message=Redactor([token or ""]).text(failure.message)))


async def stream(
    method: Callable[..., Any],
    request: object,
    reply: type[Reply],
    *,
    timeout: float | None,
    peer: str,
    token: str | None = None,
) -> AsyncIterator[Reply]:
    """Makes one server-streaming call and yields its answers; closing the iterator cancels the call. Raises as `call`
    does.
    """
    pending = method(request, timeout=timeout, metadata=_metadata(token))
    try:
        async for answer in pending:
            assert isinstance(answer, reply)
            yield answer
    except grpc.aio.AioRpcError as error:
        raise _failed(error, peer, token) from error
    finally:
        pending.cancel()
