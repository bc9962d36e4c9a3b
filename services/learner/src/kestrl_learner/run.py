"""A run from start to end: read, connect, load, then train or evaluate; its end is published and written to
`summary.json`.

`KeepAlive` keeps the program alive after the run, as on a cluster, so that clients can still read how the run ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from opentelemetry import context as otel_context
from opentelemetry.propagate import extract

from kestrl._shared.plan.settings.learner import EvaluateSettings, LearnerSettings
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.errors import Boundary, Failure, KestrlError
from kestrl.runstate.events import (
    ActivityNoted,
    CheckpointFound,
    Compared,
    ObservationsEnded,
    PhaseEntered,
    StepsPlanned,
    StorageAwaited,
    StorageRefused,
)
from kestrl.runstate.states import RunPhase
from kestrl.storage import AdapterManifest, fetch_adapter, open_store
from kestrl_learner.concurrency import Interrupted, abandonable, guarded, unless
from kestrl_learner.dispatch.dispatcher import Dispatcher
from kestrl_learner.progress.learning import learning_in
from kestrl_learner.progress.progress import Progress
from kestrl_learner.run_resources import RunResources
from kestrl_learner.store import resume
from kestrl_learner.store.event_log import EventLog
from kestrl_learner.store.records import summary_of
from kestrl_learner.store.run_end import end_run
from kestrl_learner.store.runstore import DRAIN_SECONDS, Patience, RunStore
from kestrl_learner.train.compute import Compute, release_cache
from kestrl_learner.train.launcher import load_compute
from kestrl_learner.training import TrainingRun

if TYPE_CHECKING:
    from kestrl.algorithms import Algorithm
    from kestrl_learner.dispatch.group_source import GroupSource
    from kestrl_learner.ledger import Ledger

log = logging.getLogger(__name__)


def _no_ranks() -> None:
    """Ends no ranks."""


class LearnerRun:
    """One run of one job. Nothing is read before `main`, so that progress can be served from the start."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        algorithm = settings.algorithm
        episodes = algorithm.groups_per_step * algorithm.group_size
        self.progress = Progress(len(settings.engines), episodes, offers_tools=settings.tools)
        self._drain = asyncio.Event()
        self._patience = Patience(settings.storage_seconds)
        self._resources: RunResources | None = None
        self._training: TrainingRun | None = None
        self._end_ranks: Callable[[], None] = _no_ranks
        self._over = False
        self._events: EventLog | None = None

    @property
    def training(self) -> bool:
        """Whether training has begun, so that a drain may have to finish a step and write a checkpoint."""
        return self._training is not None

    def drain(self) -> None:
        """Finishes the current step, writes a checkpoint and ends. No effect on a run that has ended."""
        if self.progress.final:
            return
        self._drain.set()
        self._patience.hurry(DRAIN_SECONDS)
        if self._training is not None:
            self._training.drain()
        self.progress.emit(PhaseEntered(phase=RunPhase.DRAINING, message="finishing the current step"))

    def abandon(self) -> None:
        """Ends all waiting for storage in threads, for a run that is being cancelled."""
        self._patience.hurry()

    async def main(self) -> None:
        """Runs to the end, publishes how the run ended and writes `summary.json`.

        Raises:
            KestrlError: The run failed.
        """
        try:
            with _traced(self.settings.traceparent), span(SpanName.JOB, self._attributes()):
                await self._run()
        except KestrlError as error:
            await self._failed(error.failure(component="learner-0"))
            raise
        except Exception as error:  # reported like any other failure, and raised: it is a bug
            message = f"{type(error).__name__}: {error}"
            await self._failed(
                Failure(boundary=Boundary.INFRASTRUCTURE, code="internal", message=message, component="learner-0")
            )
            raise
        finally:
            if self._events is not None:
                await self._events.flush()
            if self._training is not None:
                self._training.close()
            self.abandon()
            self._over = True
            await asyncio.to_thread(self._end_ranks)
            self._resources = self._training = None  # frees model and data; progress needs neither
            self._end_ranks = _no_ranks

    async def _failed(self, failure: Failure) -> None:
        """Publishes the failure and writes the summary."""
        self._clear_observations()
        self.progress.emit(PhaseEntered(phase=RunPhase.FAILED, failure=failure, message=failure.message[:300]))
        if self._resources is not None:
            await self._end(self._resources, RunPhase.FAILED, reason=str(failure))

    async def _end(self, resources: RunResources, status: RunPhase, *, reason: str = "") -> None:
        self.progress.record_work()
        state = self.progress.state
        summary = summary_of(
            state.but(learning=learning_in(state, self.settings)),
            status=status,
            reason=reason,
            seconds=resources.seconds(),
            gap_bound=self.settings.gap_bounds.mean,
            sampling=self.settings.evaluation if resources.validation else None,
        )
        await end_run(resources.store, resources.sinks, summary)

    def _attributes(self) -> dict[str, str]:
        return {Attr.JOB: self.settings.job, Attr.RUN: self.settings.run}

    def _clear_observations(self) -> None:
        """Clears observations of engines and workers, which would be outdated after the run's end."""
        self.progress.emit(ObservationsEnded())

    async def _run(self) -> None:
        settings, progress = self.settings, self.progress
        progress.begin()
        progress.emit(ActivityNoted(message="reading the data"))
        resources = self._resources = await abandonable(self._read, name="read-data")
        progress.emit(StepsPlanned(total=resources.steps))
        if settings.evaluate is None and await self._has_ended(resources):
            return
        resources.connect()
        progress.emit(ActivityNoted(message="loading the model; engines start"))
        if settings.threads:
            torch.set_num_threads(settings.threads)
        watching = [
            asyncio.create_task(resources.engines.watch(), name="watch-engines"),
            asyncio.create_task(resources.workers.watch(), name="watch-workers"),
            asyncio.create_task(resources.pinned_tools.watch(), name="watch-tools"),
        ]
        status, message = RunPhase.SUCCEEDED, ""
        try:
            await guarded(self._work(resources), *watching)
        except Interrupted:
            # `Training` has written a checkpoint.
            status, message = RunPhase.SUSPENDED, f"at step {progress.state.steps.done}"
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await resources.close()
        await self._end(resources, status)
        self._clear_observations()
        progress.emit(PhaseEntered(phase=status, message=message))

    def _read(self) -> RunResources:
        settings, progress = self.settings, self.progress
        store = RunStore(
            settings.storage,
            patience=self._patience,
            refused=lambda reason: progress.emit_soon(StorageRefused(reason=reason)),
            waiting=lambda reason: progress.emit_soon(StorageAwaited(reason=reason)),
        )
        return RunResources(settings, progress, self._drain, store)

    async def _has_ended(self, resources: RunResources) -> bool:
        """Reads the progress of earlier processes of the run; with `keep_alive`, a run that has succeeded is not
        repeated.
        """
        settings = self.settings
        manifest = await asyncio.to_thread(resume.newest_checkpoint, resources.store)
        if manifest is None:
            return False
        self.progress.emit(CheckpointFound(step=manifest.step))
        if not settings.keep_alive:
            return False
        final = await asyncio.to_thread(
            resume.completed,
            resources.store,
            manifest,
            job=settings.job,
            continues=resources.continues,
            steps=resources.steps,
        )
        if final:
            log.info("run %s has succeeded already", settings.run)
        for event in final:
            self.progress.emit(event)
        return bool(final)

    async def _work(self, resources: RunResources) -> None:
        async with AsyncExitStack() as turn:
            if self.settings.base_offload:  # the model is loaded on the device, where the engine takes the base's place
                await unless(self._drain, turn.enter_async_context(resources.engines.asleep()))
            compute = await self._loaded(resources)
        if self.settings.evaluate is not None:
            await self._evaluate(resources, compute, self.settings.evaluate)
        else:
            self._training = TrainingRun(resources, compute, partial(_rollouts, resources, compute.model.vocabulary))
            if self._drain.is_set():
                self._training.drain()
            self._events = EventLog(resources.store, self.progress, self._training.owner)
            storing = asyncio.create_task(self._events.watch(), name="store-events")
            try:
                await self._training.run()
            finally:
                storing.cancel()
                await asyncio.wait([storing])

    async def _loaded(self, resources: RunResources) -> Compute:
        """Loads the model while workers start."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(abandonable(self._load, name="load-model"), name="load-model")
                tasks.create_task(unless(self._drain, resources.workers.connect()), name="connect-workers")
        except* KestrlError as errors:
            raise errors.exceptions[0] from errors
        except* Interrupted:
            raise Interrupted from None
        return loading.result()

    def _load(self) -> Compute:
        compute, end_ranks = load_compute(
            self.settings, lambda message: self.progress.emit_soon(ActivityNoted(message=message))
        )
        self._end_ranks = end_ranks
        if self._over:  # nobody waited for it
            end_ranks()
        return compute

    async def _evaluate(self, resources: RunResources, compute: Compute, settings: EvaluateSettings) -> None:
        """Evaluates an adapter, or without one the base model, published as version 0."""
        address = settings.adapter
        if address is None:
            policy = await resources.publish(compute, 0, None)
        else:
            manifest = await asyncio.to_thread(_known_adapter, address)
            policy = manifest.policy
            await resources.serve(policy, address, manifest.parent, began=time.monotonic())
        after = await resources.evaluate_once(policy)
        self.progress.emit(Compared(when="after", means=after))


def _rollouts(resources: RunResources, vocabulary: int, ledger: Ledger, algorithm: Algorithm) -> GroupSource:
    """The source of groups that workers roll out."""
    return Dispatcher(
        resources.settings,
        resources.scenarios,
        ledger,
        resources.workers,
        resources.engines,
        resources.progress,
        vocabulary,
        algorithm,
        steps=resources.steps,
    )


def _known_adapter(address: str) -> AdapterManifest:
    with TemporaryDirectory() as folder:
        return fetch_adapter(open_store(address), Path(folder) / "adapter")


@contextmanager
def _traced(parent: str | None) -> Generator[None]:
    """Attaches the trace context of a W3C `traceparent`, if one is given."""
    token = otel_context.attach(extract({} if parent is None else {"traceparent": parent}))
    try:
        yield
    finally:
        otel_context.detach(token)


class KeepAlive:
    """A run that, with `keep_alive`, keeps the program alive after its end, so that its progress can still be read."""

    def __init__(self, run: LearnerRun) -> None:
        self._run, self._stop = run, asyncio.Event()
        self._interrupted = False

    def stop(self) -> bool:
        """Ends the program; returns whether the run had not ended yet."""
        self._interrupted = not self._run.progress.final
        self._stop.set()
        return self._interrupted

    async def main(self) -> None:
        """Runs, then with `keep_alive` waits for `stop`.

        Raises:
            KestrlError: The run failed, and the program is not kept alive or was being stopped.
        """
        try:
            await self._run_to_end()
            if self._run.settings.keep_alive:
                _free_memory(self._run.settings.device)
                await self._stop.wait()
        finally:
            self._run.progress.end()

    async def _run_to_end(self) -> None:
        try:
            await self._run.main()
        except KestrlError as error:
            if self._interrupted or not self._run.settings.keep_alive:
                raise
            log.error("the run has failed: %s", error.failure())


def _free_memory(device: str) -> None:
    """Frees the memory of the model, on its device too."""
    gc.collect()
    release_cache(device)
