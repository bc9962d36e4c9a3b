"""Mapping between failures and gRPC statuses, and the metadata key of a complete failure."""

from __future__ import annotations

import grpc

from kestrl.episode.codec import failure_from_proto
from kestrl.errors import Boundary, Failure

FAILURE_KEY = "kestrl-failure-bin"
TOKEN_KEY = "kestrl-token"  # noqa: S105 - the name of a metadata key

STATUS_BY_BOUNDARY: dict[Boundary, grpc.StatusCode] = {
    Boundary.POLICY: grpc.StatusCode.INVALID_ARGUMENT,
    Boundary.TOOL: grpc.StatusCode.ABORTED,
    Boundary.SANDBOX: grpc.StatusCode.ABORTED,
    Boundary.JUDGE: grpc.StatusCode.ABORTED,
    Boundary.ENGINE: grpc.StatusCode.UNAVAILABLE,
    Boundary.INFRASTRUCTURE: grpc.StatusCode.UNAVAILABLE,
    Boundary.USER_CODE: grpc.StatusCode.FAILED_PRECONDITION,
    Boundary.ENVIRONMENT: grpc.StatusCode.ABORTED,
}
RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}


def failure_of(error: grpc.aio.AioRpcError, *, peer: str) -> Failure:
    """Failure of a call: the one attached by the server, or one derived from the status."""
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_KEY and isinstance(value, bytes):
            return failure_from_proto(value)
    code = error.code()
    return Failure(
        boundary=Boundary.INFRASTRUCTURE,
        code=code.name.lower(),
        message=f"{peer}: {code.name}: {error.details() or 'no details'}",
        retryable=code in RETRYABLE,
        component=peer,
    )


def went_away(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call failed because the server was unreachable, rather than by its answer."""
    answered = any(key == FAILURE_KEY for key, _ in error.trailing_metadata() or ())
    return error.code() is grpc.StatusCode.UNAVAILABLE and not answered
