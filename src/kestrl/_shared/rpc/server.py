"""gRPC server with credential check, trace context, typed errors, health, and draining on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2
from opentelemetry import context as otel_context
from opentelemetry.propagate import extract

from kestrl._shared.credentials import checked_by
from kestrl._shared.rpc.bundle import BundleServicer
from kestrl._shared.rpc.client import OPTIONS
from kestrl._shared.rpc.status import FAILURE_KEY, STATUS_BY_BOUNDARY, TOKEN_KEY
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.api.bundle.v1 import bundle_pb2
from kestrl.api.bundle.v1 import bundle_pb2_grpc as bundle_grpc
from kestrl.episode.codec import failure_to_proto
from kestrl.errors import Boundary, Failure, KestrlError, UserInputError

log = logging.getLogger(__name__)
HEALTH_PREFIX = "/grpc.health."
# The package has no types for its servicer.
health: Any = import_module("grpc_health.v1.health")
health_grpc: Any = import_module("grpc_health.v1.health_pb2_grpc")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> None:
    context.set_trailing_metadata(((FAILURE_KEY, failure_to_proto(failure).SerializeToString()),))
    await context.abort(STATUS_BY_BOUNDARY[failure.boundary], failure.message[:2000])


def _carrier(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


class _Calls:
    """Counts calls, by method and by how they failed."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        observe(Metric.RPC_RUNNING, lambda: self.running)
        observe(Metric.RPC_CALLS, lambda: self.ended)

    def begins(self, method: str) -> None:
        self.running[method] += 1

    def ends(self, method: str, failure: str) -> None:
        self.running[method] -= 1
        self.ended[method, failure] += 1


class _Interceptor(grpc.aio.ServerInterceptor):
    """Interceptor of every call: checks the credential, sets the trace context, converts and counts errors."""

    def __init__(self, component: str, tokens: Sequence[str]) -> None:
        """`tokens` are the accepted credentials; if empty, every call is accepted."""
        self._component = component
        self._tokens = [token.encode() for token in tokens]
        self._calls = _Calls()

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        credential = _carrier(context).get(TOKEN_KEY, "").encode()
        # All are compared, each in constant time, so that timing reveals nothing about them.
        if self._tokens and not sum(hmac.compare_digest(credential, token) for token in self._tokens):
            message = f"the credential for calls to {self._component} is missing or wrong"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, KestrlError):
            return error.failure(component=self._component)
        log.error("unexpected error in a handler", exc_info=error)
        return Failure(
            boundary=Boundary.INFRASTRUCTURE,
            code="internal",
            message=f"{self._component}: {type(error).__name__}: {error}",
            component=self._component,
        )

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs bind type variables per call
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._admitted(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            self._stream(method, handler.unary_stream), handler.request_deserializer, handler.response_serializer
        )

    async def _answered(self, method: str, carrier: Mapping[str, str], work: Callable[[], Awaitable[Any]]) -> Any:
        """Answer of a unary method, or its failure."""
        token, failure = otel_context.attach(extract(carrier)), None
        self._calls.begins(method)
        try:
            answer = await work()
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Raised by the handler although nothing cancelled the call: without an answer its caller would wait until
            # the timeout.
            failure = self._failure(KestrlError(f"{error!r}, though nothing cancelled it", code="internal"))
        except Exception as error:  # noqa: BLE001 - the one interceptor where any error becomes a typed failure
            failure = self._failure(error)
        else:
            return answer
        finally:
            self._calls.ends(method, "" if failure is None else f"{failure.boundary}/{failure.code}")
            otel_context.detach(token)
        return failure

    def _unary(self, method: str, handler: Any) -> Any:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(context)
            answer = await self._answered(method, _carrier(context), lambda: handler(request, context))
            if isinstance(answer, Failure):
                await _abort(context, answer)
            return answer

        return handle

    async def bundled(
        self, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], call: bundle_pb2.Call
    ) -> bundle_pb2.Answer:
        """Answers a call of a bundle."""

        async def work() -> bytes:
            handler: Any = handlers.get(call.method)
            if handler is None:
                raise KestrlError(f"there is no method {call.method} here", code="unimplemented")
            answer = await handler.unary_unary(handler.request_deserializer(call.request), None)
            serialised: bytes = handler.response_serializer(answer)
            return serialised

        answer = await self._answered(call.method.rpartition("/")[2], call.context, work)
        if isinstance(answer, Failure):
            return bundle_pb2.Answer(id=call.id, failure=failure_to_proto(answer))
        return bundle_pb2.Answer(id=call.id, response=answer)

    def _admitted(self, handler: Any) -> Any:
        async def handle(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            await self._admit(context)
            async for answer in handler(requests, context):
                yield answer

        return handle

    def _stream(self, method: str, handler: Any) -> Any:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            await self._admit(context)
            # An async generator may resume in another context, so the token cannot be detached; it ends with the task.
            otel_context.attach(extract(_carrier(context)))
            outcome = ""
            self._calls.begins(method)
            try:
                async for answer in handler(request, context):
                    yield answer
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the one interceptor where any error becomes a typed failure
                failure = self._failure(error)
                outcome = f"{failure.boundary}/{failure.code}"
                await _abort(context, failure)
            finally:
                self._calls.ends(method, outcome)

        return handle


class _Methods:
    """Wrapper of a server that records the methods that generated code adds, by path."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, dict(handlers))


async def serve(
    component: str,
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    grace: float = 10.0,
    until: Awaitable[object] | None = None,
    bundles: bool = False,
) -> None:
    """Serves until SIGTERM or SIGINT (or until `until` is done), then drains: unhealthy first, then `drain`, then the
    port.

    Args:
        component: Role and ordinal. Callers must send a credential for this role, if this process has one to check.
        listen: `host:port`.
        register: Callback that adds the services to the server.
        drain: Awaited before the server stops accepting calls: finishes or returns work in progress.
        grace: Seconds for calls in progress after `drain`.
        until: Ends serving when done; its exception, if any, is raised here. It is also awaited after a signal, so
            `drain` must make it end, for example by cancelling it.
        bundles: Whether unary methods can also be called in bundles; they must not use gRPC's context then.

    Raises:
        UserInputError: The port is taken.
    """
    checked = [secret.here() for secret in checked_by(component.partition("-")[0])]
    interceptor = _Interceptor(component, [token for token in checked if token])
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=[
            *OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # Clients send keepalive pings every 30 s; by default a server treats pings on a quiet stream as an attack
            # after 5 minutes and closes the connection.
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    methods = _Methods(server)
    register(cast(grpc.aio.Server, methods))
    ending = asyncio.Event()
    if bundles:
        bundle_grpc.add_BundleServiceServicer_to_server(
            BundleServicer(lambda call: interceptor.bundled(methods.handlers, call), ending), server
        )
    healthy = health.aio.HealthServicer()
    health_grpc.add_HealthServicer_to_server(healthy, server)
    try:
        bound = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise UserInputError(f"{component}: cannot listen on {listen}: the port is taken or not permitted") from error
    if bound == 0:
        raise UserInputError(f"{component}: cannot listen on {listen}: the port is taken or not permitted")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("%s serves on %s", component, listen)
    waits: list[asyncio.Future[Any]] = [asyncio.create_task(stopping.wait(), name="stop-signal")]
    if until is not None:
        waits.append(asyncio.ensure_future(until))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if drain is not None:
            await drain()
    finally:
        ending.set()
        await server.stop(grace)
        waits[0].cancel()
    if until is not None and not waits[1].cancelled():
        await waits[1]
