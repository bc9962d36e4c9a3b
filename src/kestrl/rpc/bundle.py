"""Many small calls over one stream: both ends.

A unary call of grpc.aio costs 150 us here and as much there, in objects and in passes between threads: a thousand of them a second are a fifth of a
core. What comes together within two milliseconds goes in one message, so a call costs the less the more there are. Failures, credential and trace
context are as in calls of their own.
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

from kestrl.alarms import Alarms
from kestrl.api.bundle.v1 import bundle_pb2 as pb
from kestrl.api.bundle.v1 import bundle_pb2_grpc as stubs
from kestrl.errors import Boundary, Failure, FailureError
from kestrl.rpc.client import Channel, shown
from kestrl.rpc.codec import failure_from_proto
from kestrl.rpc.status import failure_of, went_away

log = logging.getLogger(__name__)
MESSAGE_BYTES = 4 * 1024 * 1024
"""A message that has so many is sent, however much more there is to say."""
COMPANY_SECONDS = 0.002
"""That the first call of a message waits for others to go with it: a message costs as much as four calls."""


class _Sized(Protocol):
    def ByteSize(self) -> int: ...


Item = TypeVar("Item", bound=_Sized)
Reply = TypeVar("Reply")


def take(waiting: deque[Item]) -> list[Item]:
    """What the next message carries: all that waits, or as much as is enough for one."""
    taken, size = list[Item](), 0
    while waiting and size < MESSAGE_BYTES:
        taken.append(waiting.popleft())
        size += taken[-1].ByteSize()
    return taken


class _StreamEndedError(Exception):
    """A stream ended before it answered."""

    def __init__(self, failure: Failure, *, nobody: bool) -> None:
        super().__init__(failure.message)
        self.failure, self.nobody = failure, nobody
        """Why, and whether because nobody was there."""


class _Asked:
    """A call that waits for its answer, and until when."""

    __slots__ = ("answer", "at")

    def __init__(self, answer: asyncio.Future[pb.Answer], at: float) -> None:
        self.answer, self.at = answer, at

    def ring(self) -> None:
        self.fail(TimeoutError())

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Stream:
    """One stream, from its first call to its end."""

    def __init__(self, channel: Channel, peer: str, token: str | None) -> None:
        stub: Any = stubs.BundleServiceStub(channel)
        self._peer = peer
        self._ids = itertools.count(1)
        self._waiting: deque[pb.Call] = deque()
        self._cancelled: list[int] = []
        self._asked: dict[int, _Asked] = {}
        self._alarms = Alarms()
        self._more = asyncio.Event()
        self._call = stub.Run(metadata=shown(token))
        self._running = asyncio.create_task(self._run(), name=f"bundle-{peer}")
        self._cut = False
        """Whether it ended while it was written to. grpc.aio then says INTERNAL of its own, and not what the server said."""
        self.ended = False

    async def ask(self, method: str, request: bytes, *, ends: float) -> pb.Answer:
        """Waits till `ends`, by the loop's clock. Who stops waiting takes the call back.

        Raises:
            _StreamEndedError: There will be no answer.
            TimeoutError: There was none in time.
        """
        carrier: dict[str, str] = {}
        inject(carrier)
        number = next(self._ids)
        asked = self._asked[number] = _Asked(asyncio.get_running_loop().create_future(), ends)
        self._alarms.add(asked)
        self._waiting.append(pb.Call(id=number, method=method, request=request, context=carrier))
        self._more.set()
        try:
            return await asked.answer
        finally:
            self._alarms.discard(asked)
            if self._asked.pop(number, None) is not None:
                self._cancelled.append(number)
                self._more.set()

    async def end(self) -> None:
        """Ends it; what is still asked has failed."""
        self._running.cancel()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        writing = asyncio.create_task(self._write(), name=f"bundle-{self._peer}-writes")
        writing.add_done_callback(self._wrote)
        failure, nobody = _unavailable(self._peer, "the stream was ended"), True
        try:
            await self._read()
        except grpc.aio.AioRpcError as error:
            if not (self._cut and error.code() is grpc.StatusCode.INTERNAL):
                failure, nobody = failure_of(error, peer=self._peer), went_away(error)
        finally:
            self.ended = True
            writing.cancel()
            self._call.cancel()
            unanswered, self._asked = self._asked, {}
            for asked in unanswered.values():
                asked.fail(_StreamEndedError(failure, nobody=nobody))
            await asyncio.wait([writing])

    def _wrote(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and writing.exception() is not None:
            log.error("a bundle for %s cannot be written", self._peer, exc_info=writing.exception())
            self._call.cancel()

    async def _read(self) -> None:
        async for response in self._call:
            for answer in response.answers:
                asked = self._asked.pop(answer.id, None)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result(answer)

    async def _write(self) -> None:
        company = 0.0  # a stream's first message waits for none: a server that refuses it does so within a millisecond
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting or self._cancelled:
                await asyncio.sleep(company)
                company = COMPANY_SECONDS
                cancelled, self._cancelled = self._cancelled, []
                try:
                    await self._call.write(pb.RunRequest(calls=take(self._waiting), cancelled=cancelled))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    self._cut = True
                    return  # it has ended; what is read says why


def _unavailable(peer: str, message: str, code: str = "unavailable") -> Failure:
    return Failure(
        boundary=Boundary.INFRASTRUCTURE, code=code, message=f"{peer}: {message}", retryable=True, component=peer
    )


class Bundle:
    """Calls of one service over one stream of a channel, opened at need and opened again when it ends."""

    def __init__(self, channel: Channel, service: str, *, peer: str, token: str | None = None) -> None:
        """`token` is the credential that the server checks; None shows none."""
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
        """Makes one call, as `kestrl.rpc.call` does; the server must serve bundles.

        Raises:
            FailureError: The call failed; carries the server's failure, or what became of the stream.
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
        read: Reply = parse.FromString(answer.response)
        return read

    async def ready(self) -> None:
        """Waits until the server is there: for ever, if it never is."""
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
            except _StreamEndedError as ended:
                if not (wait and ended.nobody):
                    raise FailureError(ended.failure) from ended


class BundleServicer(stubs.BundleServiceServicer):
    """Answers bundles, each call in a task of its own."""

    def __init__(self, answer: Callable[[pb.Call], Awaitable[pb.Answer]], stopping: asyncio.Event) -> None:
        """`answer` never raises; once `stopping` is set, streams end with the calls that they have."""
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
            left = (*watched, *calls.running.values())
            for task in left:
                task.cancel()
            await asyncio.wait(left)


class _Calls:
    """The calls of one stream, as its server sees them."""

    def __init__(self, answer: Callable[[pb.Call], Awaitable[pb.Answer]]) -> None:
        self._answer = answer
        self.running: dict[int, asyncio.Task[None]] = {}
        self.answers: deque[pb.Answer] = deque()
        self.more = asyncio.Event()

    async def read(self, requests: AsyncIterator[pb.RunRequest]) -> None:
        """Begins and cancels calls as they are asked for."""
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
