"""The learner's turn on a device that engines use while they roll out (`inference.sharing: turns`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.errors import KestrlError
from kestrl_learner.engines.known_engine import KnownEngine
from kestrl_learner.train.compute import release_cache

log = logging.getLogger(__name__)
LEASE_SECONDS = 30.0
"""How long engines sleep on after a learner that has died."""


@asynccontextmanager
async def device_turn(engines: Sequence[KnownEngine], device: str, *, seconds: float) -> AsyncGenerator[None]:
    """Lets engines sleep within the context, and gives memory that torch keeps back at its end. Their watch wakes them.

    Args:
        engines: The engines that share the device.
        device: The device, as torch names its kind.
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
        release_cache(device)


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
