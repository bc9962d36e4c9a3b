"""The learner's turn on a device that engines use while they roll out (`inference.sharing: turns`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.errors import Boundary, KestrlError
from kestrl_learner.concurrency import Signal
from kestrl_learner.engines.known_engine import KnownEngine

log = logging.getLogger(__name__)
LEASE_SECONDS = 30.0
"""How long engines sleep on after a learner that has died."""


class EngineNotStarted(KestrlError):
    """An engine that shares the learner's device does not start, so that neither can compute."""

    boundary = Boundary.ENGINE
    code = "engine_not_started"


@asynccontextmanager
async def device_turn(engines: Sequence[KnownEngine], *, seconds: float) -> AsyncGenerator[None]:
    """Lets engines sleep within the context. Their watch wakes them.

    Args:
        engines: The engines that share the device.
        seconds: Time limit for running requests to end and for an engine that is being started.

    Raises:
        EngineFailure: An engine cannot sleep, or has requests that do not end.
        DeadlineExceeded: An engine did not fall asleep in time.
    """
    await _sleep(engines, seconds)
    keeping = asyncio.create_task(_keep(engines), name="keep-device")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def started(engines: Sequence[KnownEngine], changed: Signal, *, seconds: float) -> None:
    """Waits until the server of every engine has answered its agent: before, none can be asked to sleep.

    Args:
        engines: As their watch observes them.
        changed: Notified of what it observes.
        seconds: Time limit.

    Raises:
        EngineNotStarted: One cannot start, or did not in time.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait_for(
                lambda: all(engine.started for engine in engines) or any(engine.cannot_start for engine in engines)
            )
    if any(engine.cannot_start or not engine.started for engine in engines):
        states = "; ".join(str(engine) for engine in engines)
        raise EngineNotStarted(f"an engine that shares the learner's device has not started ({states})")


async def _sleep(engines: Sequence[KnownEngine], seconds: float) -> None:
    """Puts every engine to sleep, or prolongs its sleep, all at once.

    Raises:
        KestrlError: The first failure, after all have answered.
    """
    request = pb.SleepEngineRequest(lease_seconds=LEASE_SECONDS)
    results = await asyncio.gather(
        *(engine.ask(engine.stub.SleepEngine, request, pb.SleepEngineResponse, seconds) for engine in engines),
        return_exceptions=True,
    )
    for failure in results:
        if isinstance(failure, BaseException):
            raise failure


async def _keep(engines: Sequence[KnownEngine]) -> None:
    """Prolongs the sleep, and puts an engine to sleep again that was started anew, until cancelled."""
    while True:
        await asyncio.sleep(LEASE_SECONDS / 3)
        try:
            await _sleep(engines, LEASE_SECONDS / 3)
        except KestrlError as error:
            log.warning("an engine does not sleep in the learner's turn: %s", error)
