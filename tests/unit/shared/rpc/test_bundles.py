"""Many calls over one stream, over a real server: each has its own answer, and ends as a call of its own would."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from tests.fakes.ports import free_port

from kestrl._shared.credentials import Secret
from kestrl._shared.rpc import Bundle, bundle, channel, serve
from kestrl._shared.telemetry import current_trace_id
from kestrl.api.bundle.v1 import bundle_pb2
from kestrl.api.tools.v1 import tools_pb2 as pb
from kestrl.api.tools.v1 import tools_pb2_grpc as stubs
from kestrl.errors import Boundary, FailureError, ToolFailure

SERVICE = "kestrl.api.tools.v1.ToolService"


class Tools(stubs.ToolServiceServicer):
    """Answers according to the name of the call."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        self.go, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Call(self, request: pb.CallRequest, context: Any) -> pb.CallResponse:
        self.called.append(request.arguments_json)
        match request.name:
            case "typed":
                raise ToolFailure("search: it broke", code="tool_raised")
            case "bug":
                raise ZeroDivisionError("oops")
            case "odd":
                raise asyncio.CancelledError
            case "trace":
                return pb.CallResponse(text=current_trace_id())
            case "wait":
                self.arrived.put_nowait(request.arguments_json)
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case _:
                pass
        return pb.CallResponse(text=f"{request.name} {request.arguments_json}")


@asynccontextmanager
async def served(
    tools: Tools, listen: str, *, bundles: bool = True, grace: float = 0.1
) -> AsyncGenerator[tuple[asyncio.Event, asyncio.Event]]:
    """A server: what ends it, and that it is ending."""
    stop, ending = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        ending.set()

    def register(server: Any) -> None:
        stubs.add_ToolServiceServicer_to_server(tools, server)

    server = asyncio.create_task(
        serve("tools", listen, register, until=stop.wait(), grace=grace, bundles=bundles, drain=drain)
    )
    try:
        yield stop, ending
    finally:
        stop.set()
        await server


@pytest.fixture
def listen() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def calls(listen: str) -> AsyncIterator[Bundle]:
    async with (
        channel(listen) as connection,
        Bundle(connection, SERVICE, peer="tools", token=Secret.ROLLOUT_TO_TOOLS.here()) as made,
    ):
        yield made


@pytest.fixture
async def running(tools: Tools, listen: str, calls: Bundle) -> AsyncIterator[Callable[..., Any]]:
    """Calls one tool of a server that is up."""
    async with served(tools, listen):
        await ask(calls, "first", wait=True)
        yield lambda name, **options: ask(calls, name, **options)


async def ask(calls: Bundle, name: str, said: str = "", *, timeout: float = 5, wait: bool = False) -> str:
    request = pb.CallRequest(name=name, arguments_json=said)
    return (await calls.call("Call", request, pb.CallResponse, timeout=timeout, wait=wait)).text


async def test_each_call_has_its_own_answer_in_any_order(tools: Tools, running: Any) -> None:
    slow = asyncio.create_task(running("wait", said="slow"))
    await tools.arrived.get()
    answers = await asyncio.gather(*(running("echo", said=str(number)) for number in range(300)))
    assert answers == [f"echo {number}" for number in range(300)]
    assert not slow.done()
    tools.go.set()
    assert await slow == "wait slow"


async def test_concurrent_calls_share_a_message(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()

    def counting(waiting: deque[Any]) -> list[Any]:
        taken = [waiting.popleft() for _ in range(len(waiting))]
        sent.append(len(taken))
        return taken

    monkeypatch.setattr(bundle, "take", counting)
    await asyncio.gather(*(running("echo", said=str(number)) for number in range(100)))
    assert sum(sent) == 200  # and as many answers
    assert len(sent) < 100


@given(st.lists(st.integers(0, 40), max_size=60))
def test_messages_carry_all_calls_in_order_with_bounded_size(sizes: list[int]) -> None:
    items = [bundle_pb2.Answer(id=number, response=b"x" * size) for number, size in enumerate(sizes)]
    waiting, taken, enough = deque(items), list[list[bundle_pb2.Answer]](), 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "MESSAGE_BYTES", enough)
        while waiting:
            taken.append(bundle.take(waiting))
    assert [answer for message in taken for answer in message] == items
    for message in taken:
        assert message
        assert sum(answer.ByteSize() for answer in message[:-1]) < enough


async def test_a_typed_failure_arrives_whole(running: Any) -> None:
    with pytest.raises(FailureError) as caught:
        await running("typed")
    failure = caught.value.failure()
    assert (failure.boundary, failure.code, failure.message) == (Boundary.TOOL, "tool_raised", "search: it broke")
    assert failure.component == "tools"


async def test_a_bug_is_a_typed_failure_and_harms_no_other_call(tools: Tools, running: Any) -> None:
    other = asyncio.create_task(running("wait"))
    await tools.arrived.get()
    with pytest.raises(FailureError, match="tools: ZeroDivisionError: oops"):
        await running("bug")
    tools.go.set()
    assert await other == "wait "


async def test_an_unrequested_cancellation_is_answered(running: Any) -> None:
    with pytest.raises(FailureError, match="though nothing cancelled it") as caught:
        await running("odd", timeout=30)
    assert (caught.value.boundary, caught.value.code) == (Boundary.INFRASTRUCTURE, "internal")


async def test_a_failed_write_fails_its_calls_and_is_reported(
    running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(bundle, "take", lambda _: 1 / 0)
        with pytest.raises(FailureError) as caught:
            await running("echo", timeout=30)
    assert caught.value.code == "unavailable"
    assert "a bundle for tools cannot be written" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert await running("echo", said="again") == "echo again"


async def test_a_method_that_is_not_there_is_reported(calls: Bundle, running: Any) -> None:
    del running
    with pytest.raises(FailureError, match=r"no method /kestrl\.api\.tools\.v1\.ToolService/Sing") as caught:
        await calls.call("Sing", pb.CallRequest(), pb.CallResponse, timeout=5)
    assert caught.value.code == "unimplemented"


async def test_a_deadline_has_its_code_and_ends_the_work(tools: Tools, running: Any) -> None:
    with pytest.raises(FailureError) as caught:
        await running("wait", timeout=0.1)
    assert (caught.value.code, caught.value.retryable) == ("deadline_exceeded", True)
    await tools.cancelled.wait()


async def test_a_cancelled_call_ends_the_work(tools: Tools, running: Any) -> None:
    asking = asyncio.create_task(running("wait"))
    await tools.arrived.get()
    asking.cancel()
    await tools.cancelled.wait()
    assert await running("echo", said="on") == "echo on"


async def test_the_trace_crosses(running: Any) -> None:
    parent = SpanContext(0x7, 0x9, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(parent)))
    try:
        assert await running("trace") == f"{7:032x}"
    finally:
        context.detach(token)


@pytest.mark.parametrize("shown", [None, "wrong"])
async def test_a_stream_without_the_callers_credential_is_refused(
    tools: Tools, listen: str, calls: Bundle, shown: str | None
) -> None:
    async with served(tools, listen):
        assert await ask(calls, "echo", wait=True) == "echo "
        async with channel(listen) as connection, Bundle(connection, SERVICE, peer="tools", token=shown) as others:
            with pytest.raises(FailureError) as caught:
                await ask(others, "echo", wait=True)
        assert caught.value.code == "unauthenticated"
        assert await ask(calls, "echo", said="a") == "echo a"


async def test_a_server_without_bundles_reports_it(tools: Tools, listen: str, calls: Bundle) -> None:
    async with served(tools, listen, bundles=False):
        with pytest.raises(FailureError) as caught:
            await ask(calls, "echo", wait=True)
        assert caught.value.code == "unimplemented"


async def test_an_unreachable_server_is_retryable(calls: Bundle) -> None:
    with pytest.raises(FailureError) as caught:
        await ask(calls, "echo")
    assert (caught.value.code, caught.value.retryable) == ("unavailable", True)


async def test_the_server_can_be_waited_for(tools: Tools, listen: str, calls: Bundle) -> None:
    ready = asyncio.create_task(calls.ready())
    with pytest.raises(FailureError):
        await ask(calls, "echo")
    assert not ready.done()
    async with asyncio.timeout(30), served(tools, listen):
        await ready
        assert await ask(calls, "echo") == "echo "


async def test_waiting_has_an_end(calls: Bundle) -> None:
    with pytest.raises(FailureError) as caught:
        await ask(calls, "echo", timeout=0.2, wait=True)
    assert caught.value.code == "deadline_exceeded"


async def test_when_the_server_stops_calls_fail_and_waiting_ones_are_retried(
    tools: Tools, listen: str, calls: Bundle
) -> None:
    async with served(tools, listen):
        await ask(calls, "first", wait=True)
        lost = asyncio.create_task(ask(calls, "wait", "lost", wait=False))
        waits = asyncio.create_task(ask(calls, "wait", "waits", wait=True))
        assert {await tools.arrived.get(), await tools.arrived.get()} == {"lost", "waits"}
    with pytest.raises(FailureError) as caught:
        await lost
    assert (caught.value.code, caught.value.retryable) == ("unavailable", True)
    other = Tools()
    other.go.set()
    async with served(other, listen):
        assert await waits == "wait waits"
    assert other.called == ["waits"]


async def test_a_stopping_server_answers_pending_calls_and_closes(tools: Tools, listen: str, calls: Bundle) -> None:
    async with asyncio.timeout(30), served(tools, listen, grace=60) as (stop, ending):
        last = asyncio.create_task(ask(calls, "wait", "last", wait=True))
        await tools.arrived.get()
        stop.set()
        await ending.wait()
        tools.go.set()
        assert await last == "wait last"
