"""Every credential against every method of every service, over real gRPC. What may be called follows from
`kestrl._shared.credentials` alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import grpc
import pytest
from tests.fakes.ports import free_port

from kestrl._shared.credentials import CALLS, HOLDERS, Secret, checked_by, header_value, held_by, require
from kestrl._shared.plan.components import Role
from kestrl._shared.rpc import Bundle, channel, serve
from kestrl._shared.rpc.client import shown
from kestrl.api.bundle.v1 import bundle_pb2, bundle_pb2_grpc
from kestrl.api.inference.v1 import inference_pb2, inference_pb2_grpc
from kestrl.api.judge.v1 import judge_pb2, judge_pb2_grpc
from kestrl.api.learner.v1 import learner_pb2, learner_pb2_grpc
from kestrl.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from kestrl.api.tools.v1 import tools_pb2, tools_pb2_grpc
from kestrl.errors import FailureError, UserInputError

SERVICES: dict[Role, tuple[ModuleType, ModuleType]] = {
    Role.LEARNER: (learner_pb2, learner_pb2_grpc),
    Role.ROLLOUT: (rollout_pb2, rollout_pb2_grpc),
    Role.INFERENCE: (inference_pb2, inference_pb2_grpc),
    Role.TOOLS: (tools_pb2, tools_pb2_grpc),
    Role.JUDGE: (judge_pb2, judge_pb2_grpc),
}


def described(role: Role) -> Any:
    """The descriptor of a role's one service."""
    (service,) = SERVICES[role][0].DESCRIPTOR.services_by_name.values()
    return service


def servicer(role: Role) -> object:
    """Answers every method with an empty message."""

    def method(described: Any) -> Any:
        reply = getattr(SERVICES[role][0], described.output_type.name)

        async def one(self: object, request: object, context: object) -> object:
            return reply()

        async def many(self: object, request: object, context: object) -> AsyncIterator[object]:
            yield reply()

        return many if described.server_streaming else one

    service = described(role)
    base = getattr(SERVICES[role][1], f"{service.name}Servicer")
    made: type[object] = type(service.name, (base,), {item.name: method(item) for item in service.methods})
    return made()


@asynccontextmanager
async def served(role: Role) -> AsyncIterator[str]:
    """A server of this role, as its program starts it."""
    listen, stop = f"127.0.0.1:{free_port()}", asyncio.Event()
    add = getattr(SERVICES[role][1], f"add_{described(role).name}Servicer_to_server")
    work = serve(
        f"{role}-0", listen, lambda made: add(servicer(role), made), until=stop.wait(), grace=0.1, bundles=True
    )
    server = asyncio.create_task(work)
    try:
        yield listen
    finally:
        stop.set()
        await server


async def admitted(method: Any, request: object, token: str | None) -> bool:
    """Whether a call with this credential is answered; any other refusal than that of the credential fails the test."""
    answer = method(request, metadata=shown(token), timeout=20, wait_for_ready=True)
    try:
        if hasattr(answer, "__aiter__"):
            assert [item async for item in answer]
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True


def presented() -> Iterator[tuple[str, str | None]]:
    """Every credential of a job, and what is none of them."""
    for secret in Secret:
        yield secret.name, f"of a test: {secret.value}"
    yield from (("none", None), ("empty", ""), ("another", "x"), ("a prefix", "of a test: KESTRL_LEARNER_TO_"))


@pytest.mark.parametrize("role", list(SERVICES))
async def test_each_credential_opens_its_callee_alone(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every method, in a call of its own and in a bundle."""
    for secret in Secret:
        monkeypatch.setenv(secret.value, f"of a test: {secret.value}")
    opens = {secret.name for secret, (_, callee) in CALLS.items() if callee == role}
    service = described(role)
    async with served(role) as listen, channel(listen) as connection:
        stub = getattr(SERVICES[role][1], f"{service.name}Stub")(connection)
        for name, token in presented():
            for method in service.methods:
                request = getattr(SERVICES[role][0], method.input_type.name)()
                assert await admitted(getattr(stub, method.name), request, token) is (name in opens), (
                    name,
                    method.name,
                )
            async with Bundle(connection, service.full_name, peer=str(role), token=token) as calls:
                unary = next(item for item in service.methods if not item.server_streaming)
                request, reply = (
                    getattr(SERVICES[role][0], item.name) for item in (unary.input_type, unary.output_type)
                )
                if name in opens:
                    assert await calls.call(unary.name, request(), reply, timeout=20, wait=True) == reply()
                    continue
                with pytest.raises(FailureError) as caught:
                    await calls.call(unary.name, request(), reply, timeout=20, wait=True)
                assert caught.value.code == "unauthenticated"


def test_every_service_of_the_protocol_is_in_the_matrix() -> None:
    packages = {bundle_pb2.DESCRIPTOR.package, *(protocol.DESCRIPTOR.package for protocol, _ in SERVICES.values())}
    assert packages == {
        f"kestrl.api.{name}.v1" for name in ("bundle", "inference", "judge", "learner", "rollout", "tools")
    }
    assert bundle_pb2_grpc.BundleServiceStub


def test_a_tool_or_a_worker_can_neither_load_a_policy_nor_drain() -> None:
    for role in (Role.TOOLS, Role.JUDGE, Role.ROLLOUT):
        assert not set(held_by(role)) & {*checked_by(Role.INFERENCE), *checked_by(Role.LEARNER)}
    assert set(held_by(Role.ENGINE)).isdisjoint(CALLS)


def test_each_service_has_one_caller_and_every_role_is_known() -> None:
    assert {callee for _, callee in CALLS.values()} == set(SERVICES)
    for role in SERVICES:
        assert len(checked_by(role)) == 1
    # Ranks of the learner, the pod with files and what sends a run to MLflow serve no call and make none; an agent's
    # pods have the keys of episodes alone.
    without = {Role.RANKS, Role.AGENT, Role.FILES, Role.MLFLOW}
    assert {holder for holders in HOLDERS.values() for holder in holders} == {*Role, "controller"} - without
    assert all(held_by(role) == () for role in without)


def test_a_service_without_its_credentials_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    require(Role.TOOLS)
    monkeypatch.delenv("KESTRL_ROLLOUT_TO_TOOLS_TOKEN")
    with pytest.raises(UserInputError, match="KESTRL_ROLLOUT_TO_TOOLS_TOKEN is not set"):
        require(Role.TOOLS)
    require(Role.ENGINE)


@pytest.mark.parametrize("value", ["a\nb", "token\n", " token", "\udcff\udcfe", "é", "a\0b", "a\rb"])
def test_a_credential_that_no_header_holds_is_one_error_without_its_value(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in Secret:
        monkeypatch.setenv(secret.value, "t")
    with pytest.raises(UserInputError) as caught:
        header_value(value, "KESTRL_X")
    assert str(caught.value).startswith("KESTRL_X has a line end")
    assert value not in str(caught.value)
    if "\0" in value:
        return
    monkeypatch.setenv(Secret.ROLLOUT_TO_TOOLS.value, value)
    with pytest.raises(UserInputError, match=Secret.ROLLOUT_TO_TOOLS.value):
        require(Role.TOOLS)
