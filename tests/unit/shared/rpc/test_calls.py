"""Calls over a real server: errors keep their type, credentials are checked, ports in use are reported, draining
drains."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.credentials import Secret
from kestrl._shared.rpc import call, channel, serve, stream
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.errors import Boundary, EngineFailure, FailureError, KestrlError, UserInputError


class Worker(stubs.RolloutServiceServicer):
    """Answers according to the request."""

    lost = False

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        if self.lost:
            raise EngineFailure("engine-0 is gone", code="engine_lost")
        return pb.GetCapacityResponse(concurrency=7)

    async def RunGroup(self, request: pb.RunGroupRequest, context: Any) -> AsyncIterator[pb.RunGroupResponse]:
        yield pb.RunGroupResponse()
        if request.group_id == "typed":
            raise EngineFailure("engine-0 is gone", code="engine_lost")
        if request.group_id == "bug":
            raise ZeroDivisionError("oops")
        if request.group_id == "hang":
            await asyncio.Event().wait()


Address = str


@pytest.fixture
async def address() -> AsyncIterator[Address]:
    listen = f"127.0.0.1:{free_port()}"
    server = asyncio.create_task(
        serve("rollout-0", listen, lambda server: stubs.add_RolloutServiceServicer_to_server(Worker(), server))
    )
    yield listen
    os.kill(os.getpid(), signal.SIGTERM)
    await server


async def ask(address: Address) -> pb.GetCapacityResponse:
    async with channel(address) as connection:
        stub = stubs.RolloutServiceStub(connection)
        return await call(
            stub.GetCapacity,
            pb.GetCapacityRequest(),
            pb.GetCapacityResponse,
            timeout=5,
            peer="rollout",
            token=Secret.LEARNER_TO_ROLLOUT.here(),
            wait=True,
        )


async def run_group(address: Address, group_id: str, timeout: float = 5) -> int:
    seen = 0
    async with channel(address) as connection:
        stub = stubs.RolloutServiceStub(connection)
        request = pb.RunGroupRequest(group_id=group_id)
        await ask(address)
        async for _ in stream(
            stub.RunGroup,
            request,
            pb.RunGroupResponse,
            timeout=timeout,
            peer="rollout",
            token=Secret.LEARNER_TO_ROLLOUT.here(),
        ):
            seen += 1
    return seen


async def test_a_call_is_answered(address: Address) -> None:
    assert (await ask(address)).concurrency == 7
    assert await run_group(address, "well") == 1


async def test_a_typed_failure_arrives_whole(address: Address) -> None:
    with pytest.raises(FailureError) as caught:
        await run_group(address, "typed")
    failure = caught.value.failure()
    assert (failure.boundary, failure.code, failure.retryable) == (Boundary.ENGINE, "engine_lost", True)
    assert (failure.message, failure.component) == ("engine-0 is gone", "rollout-0")


async def test_a_bug_is_a_typed_failure_too(address: Address) -> None:
    with pytest.raises(FailureError, match="rollout-0: ZeroDivisionError: oops") as caught:
        await run_group(address, "bug")
    assert (caught.value.boundary, caught.value.code) == (Boundary.INFRASTRUCTURE, "internal")


async def test_a_deadline_has_its_code(address: Address) -> None:
    with pytest.raises(FailureError) as caught:
        await run_group(address, "hang", timeout=0.3)
    assert (caught.value.code, caught.value.retryable) == ("deadline_exceeded", True)


async def test_an_unreachable_server_is_retryable() -> None:
    async with channel(f"127.0.0.1:{free_port()}") as connection:
        stub = stubs.RolloutServiceStub(connection)
        with pytest.raises(FailureError) as caught:
            await call(
                stub.GetCapacity,
                pb.GetCapacityRequest(),
                pb.GetCapacityResponse,
                timeout=5,
                peer="rollout",
                token=Secret.LEARNER_TO_ROLLOUT.here(),
            )
    assert (caught.value.code, caught.value.retryable) == ("unavailable", True)


async def test_a_caller_of_many_jobs_passes_the_credential_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_LEARNER_TO_ROLLOUT_TOKEN", "theirs")
    listen = f"127.0.0.1:{free_port()}"
    server = asyncio.create_task(
        serve("rollout-0", listen, lambda server: stubs.add_RolloutServiceServicer_to_server(Worker(), server))
    )
    await ask(listen)
    monkeypatch.setenv("KESTRL_LEARNER_TO_ROLLOUT_TOKEN", "ours")

    async def both(token: str | None) -> int:
        async with channel(listen) as connection:
            stub = stubs.RolloutServiceStub(connection)
            request, reply = pb.GetCapacityRequest(), pb.GetCapacityResponse
            answer = await call(stub.GetCapacity, request, reply, timeout=5, peer="rollout", token=token)
            group = pb.RunGroupRequest(group_id="well")
            answers = stream(stub.RunGroup, group, pb.RunGroupResponse, timeout=5, peer="rollout", token=token)
            return answer.concurrency + len([item async for item in answers])

    assert await both("theirs") == 8
    for wrong in ("", "another", None):
        with pytest.raises(FailureError) as caught:
            await both(wrong)
        assert caught.value.code == "unauthenticated"
    os.kill(os.getpid(), signal.SIGTERM)
    await server


async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserInputError, match=f"rollout-0: cannot listen on {listen}"):
            await serve("rollout-0", listen, lambda _: None)


async def test_sigterm_drains_before_the_port_closes() -> None:
    listen = f"127.0.0.1:{free_port()}"
    answered: list[int] = []

    async def drain() -> None:
        answered.append((await ask(listen)).concurrency)

    register: Callable[[Any], None] = lambda server: stubs.add_RolloutServiceServicer_to_server(Worker(), server)  # noqa: E731
    server = asyncio.create_task(serve("rollout-0", listen, register, drain=drain))
    await ask(listen)
    os.kill(os.getpid(), signal.SIGTERM)
    await server
    assert answered == [7]


async def test_serving_ends_with_the_work_it_serves_for() -> None:
    async def work() -> None:
        raise KestrlError("the run failed", code="logprob_gap")

    with pytest.raises(KestrlError, match="the run failed"):
        await serve("learner-0", f"127.0.0.1:{free_port()}", lambda _: None, until=work())


class Flaky(stubs.RolloutServiceServicer):
    """Counts callers, and answers when released."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        self.asked.set()
        await self.gate.wait()
        return pb.GetCapacityResponse(concurrency=3)


async def test_a_waiting_call_is_retried_when_the_server_returns() -> None:
    listen = f"127.0.0.1:{free_port()}"

    def started(flaky: Flaky, until: asyncio.Event) -> asyncio.Task[None]:
        work = serve(
            "rollout-0",
            listen,
            lambda server: stubs.add_RolloutServiceServicer_to_server(flaky, server),
            until=until.wait(),
            grace=0.0,
        )
        return asyncio.create_task(work)

    first, second, gone, end = Flaky(), Flaky(), asyncio.Event(), asyncio.Event()
    asking = asyncio.create_task(ask(listen))  # before anybody is there
    server = started(first, gone)
    await first.asked.wait()
    gone.set()
    await server
    server = started(second, end)
    second.gate.set()
    assert (await asking).concurrency == 3
    end.set()
    await server


async def test_a_waiting_call_is_not_retried_after_a_failure(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's failure travels as UNAVAILABLE too."""
    monkeypatch.setattr(Worker, "lost", True)
    async with channel(address) as connection:
        stub = stubs.RolloutServiceStub(connection)
        asked = 0

        def counting(request: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return stub.GetCapacity(request, **options)

        with pytest.raises(FailureError) as caught:
            await call(
                counting,
                pb.GetCapacityRequest(),
                pb.GetCapacityResponse,
                timeout=5,
                peer="rollout",
                token=Secret.LEARNER_TO_ROLLOUT.here(),
                wait=True,
            )
        assert caught.value.code == "engine_lost"
        assert asked == 1


async def test_waiting_has_an_end() -> None:
    async with channel(f"127.0.0.1:{free_port()}") as connection:
        stub = stubs.RolloutServiceStub(connection)
        with pytest.raises(FailureError) as caught:
            await call(
                stub.GetCapacity,
                pb.GetCapacityRequest(),
                pb.GetCapacityResponse,
                timeout=0.3,
                peer="rollout",
                token=Secret.LEARNER_TO_ROLLOUT.here(),
                wait=True,
            )
        assert caught.value.code == "deadline_exceeded"
        assert caught.value.retryable
