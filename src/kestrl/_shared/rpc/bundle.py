"""Many small calls over one stream: client and server.

A unary call of grpc.aio costs 150 us at each end, in objects and in thread switches: a thousand of them a second take a
fifth of a core. Calls that arrive within two milliseconds share one message, so the cost per call falls with their
number. Failures, credentials and trace context are those of separate calls.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
from opentelemetry.propagate import inject

from kestrl._shared.rpc.client import Channel, shown
from kestrl._shared.rpc.status import failure_of, went_away
from kestrl.api.bundle.v1 import bundle_pb2 as pb
from kestrl.api.bundle.v1 import bundle_pb2_grpc as stubs
from kestrl.episode.codec import failure_from_proto
from kestrl.errors import Boundary, Failure, FailureError

log = logging.getLogger(__name__)
MESSAGE_BYTES = 4 * 1024 * 1024
"""Size in bytes above which a message takes no more calls."""
BATCH_SECONDS = 0.002
"""Batching window: seconds for which the first call of a message waits for others. A message costs as much as four
calls."""


class _Sized(Protocol):
    def ByteSize(self) -> int: ...


Item = TypeVar("Item", bound=_Sized)
Reply = TypeVar("Reply")


def take(waiting: deque[Item]) -> list[Item]:
    """Takes the calls of the next message: all waiting ones, up to the maximum size."""
    batch, size = list[Item](), 0
    while waiting and size < MESSAGE_BYTES:
        batch.append(waiting.popleft())
        size += batch[-1].ByteSize()
    return batch


class _StreamEndedError(Exception):
    """A stream ended before an answer arrived."""

    def __init__(self, failure: Failure, *, unreachable: bool) -> None:
        super().__init__(failure.message)
        self.failure, self.unreachable = failure, unreachable
        """The failure, and whether the server was unreachable."""


class _Stream:
    """One stream from its first call to its end."""

    def __init__(self, channel: Channel, peer: str, token: str | None) -> None:
        stub: Any = stubs.BundleServiceStub(channel)
        self._peer = peer
        self._ids = itertools.count(1)
        self._waiting: deque[pb.Call] = deque()
        self._cancelled: list[int] = []
        self._asked: dict[int, asyncio.Future[pb.Answer]] = {}
        self._more = asyncio.Event()
        self._call = stub.Run(metadata=shown(token))
        self._running = asyncio.create_task(self._run(), name=f"bundle-{peer}")
        self._cut = False
        """Whether the stream ended during a write. grpc.aio then reports INTERNAL instead of the server's status."""
        self.ended = False

    async def ask(self, method: str, request: bytes, *, ends: float) -> pb.Answer:
        """Waits until `ends`, by the clock of the event loop. Cancelling the wait cancels the call.

        Raises:
            _StreamEndedError: The stream ended without an answer.
            TimeoutError: No answer arrived in time.
        """
        carrier: dict[str, str] = {}
        inject(carrier)
        number = next(self._ids)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._waiting.append(pb.Call(id=number, method=method, request=request, context=carrier))
        self._more.set()
        try:
            async with asyncio.timeout_at(ends):
                answer: pb.Answer = await future
                return answer
        finally:
            if self._asked.pop(number, None) is not None:
                self._cancelled.append(number)
                self._more.set()

    async def end(self) -> None:
        """Ends the stream; pending calls fail."""
        self._running.cancel()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        writing = asyncio.create_task(self._write(), name=f"bundle-{self._peer}-writes")
        writing.add_done_callback(self._wrote)
        failure, unreachable = _unavailable(self._peer, "the stream was ended"), True
        try:
            await self._read()
        except grpc.aio.AioRpcError as error:
            if not (self._cut and error.code() is grpc.StatusCode.INTERNAL):
                failure, unreachable = failure_of(error, peer=self._peer), went_away(error)
        finally:
            self.ended = True
            writing.cancel()
            self._call.cancel()
            unanswered, self._asked = self._asked, {}
            for future in unanswered.values():
                if not future.done():
                    future.set_exception(_StreamEndedError(failure, unreachable=unreachable))
            await asyncio.wait([writing])

    def _wrote(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and writing.exception() is not None:
            log.error("a bundle for %s cannot be written", self._peer, exc_info=writing.exception())
            self._call.cancel()

    async def _read(self) -> None:
        async for response in self._call:
            for answer in response.answers:
                future = self._asked.pop(answer.id, None)
                if future is not None and not future.done():
                    future.set_result(answer)

    async def _write(self) -> None:
        window = 0.0  # the first message is sent immediately, so that a refusal by the server arrives early
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting or self._cancelled:
                await asyncio.sleep(window)
                window = BATCH_SECONDS
                cancelled, self._cancelled = self._cancelled, []
                try:
                    await self._call.write(pb.RunRequest(calls=take(self._waiting), cancelled=cancelled))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    self._cut = True
                    return  # the stream has ended; the reader reports why


def _unavailable(peer: str, message: str, code: str = "unavailable") -> Failure:
    return Failure(
        boundary=Boundary.INFRASTRUCTURE, code=code, message=f"{peer}: {message}", retryable=True, component=peer
    )


class Bundle:
    """Calls of one service over one stream of a channel, which is opened on demand and reopened after it ended."""

    def __init__(self, channel: Channel, service: str, *, peer: str, token: str | None = None) -> None:
        """`token` is the credential for the server; None sends none."""
        self._channel, self._service, self._peer, self._token = channel, service, peer, token
        self._stream: _Stream | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            await self._stream.end()

    async def call(self, method: str, request: Any, reply: type[Reply], *, timeout: float, wait: bool = False) -> Reply:
        """Makes one call, as `kestrl._shared.rpc.call` does; the server must serve bundles.

        Raises:
            FailureError: The call failed; has the server's failure, or that of the stream.
        """
        message, path = request.SerializeToString(), f"/{self._service}/{method}"
        ends = asyncio.get_running_loop().time() + timeout
        try:
            answer = await self._ask(path, message, ends=ends, wait=wait)
        except TimeoutError as late:
            raise FailureError(_unavailable(self._peer, f"{method}: no answer in time", "deadline_exceeded")) from late
        if answer.HasField("failure"):
            raise FailureError(failure_from_proto(answer.failure))
        parse: Any = reply
        response: Reply = parse.FromString(answer.response)
        return response

    async def ready(self) -> None:
        """Waits until the server is reachable, without a time limit."""
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            await self._channel.channel_ready()

    async def _ask(self, path: str, message: bytes, *, ends: float, wait: bool) -> pb.Answer:
        while True:
            if wait:
                async with asyncio.timeout_at(ends):
                    await self.ready()
            if self._stream is None or self._stream.ended:
                self._stream = _Stream(self._channel, self._peer, self._token)
            try:
                return await self._stream.ask(path, message, ends=ends)
            except _StreamEndedError as error:
                if not (wait and error.unreachable):
                    raise FailureError(error.failure) from error


class BundleServicer(stubs.BundleServiceServicer):
    """Serves bundles, with one task per call."""

    def __init__(self, answer: Callable[[pb.Call], Awaitable[pb.Answer]], stopping: asyncio.Event) -> None:
        """`answer` must not raise; once `stopping` is set, streams end after their pending calls."""
        self._answer, self._stopping = answer, stopping

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest], context: Any) -> AsyncIterator[pb.RunResponse]:  # noqa: ARG002 - gRPC's names
        calls = _Calls(self._answer)
        reading = asyncio.create_task(calls.read(request_iterator), name="bundle-reads")
        stopping = asyncio.create_task(self._stopping.wait(), name="bundle-stops")
        watched: tuple[asyncio.Task[Any], ...] = (reading, stopping)
        for task in watched:
            task.add_done_callback(lambda _: calls.more.set())
        try:
            while calls.running or calls.answers or not reading.done():
                await calls.more.wait()
                calls.more.clear()
                while calls.answers:
                    yield pb.RunResponse(answers=take(calls.answers))
                if stopping.done():
                    reading.cancel()
            if not reading.cancelled():
                reading.result()
        finally:
            tasks = (*watched, *calls.running.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class _Calls:
    """The calls of one stream in the server."""

    def __init__(self, answer: Callable[[pb.Call], Awaitable[pb.Answer]]) -> None:
        self._answer = answer
        self.running: dict[int, asyncio.Task[None]] = {}
        self.answers: deque[pb.Answer] = deque()
        self.more = asyncio.Event()

    async def read(self, requests: AsyncIterator[pb.RunRequest]) -> None:
        """Starts and cancels calls as requested."""
        async for request in requests:
            for call in request.calls:
                self.running[call.id] = asyncio.create_task(self._run(call), name=f"bundled{call.method}")
                self.running[call.id].add_done_callback(partial(self._ended, call.id))
            for number in request.cancelled:
                if number in self.running:
                    self.running[number].cancel()

    async def _run(self, call: pb.Call) -> None:
        self.answers.append(await self._answer(call))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del task
        del self.running[number]
        self.more.set()
