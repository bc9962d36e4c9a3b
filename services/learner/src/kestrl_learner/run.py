"""A run from start to end: read, connect, load, then train or evaluate; whatever happens, watchers and `summary.json` are told.

`Stay` is a run and what comes after it: on a cluster the program lingers, so that who watches can still ask how the run ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from opentelemetry import context as otel_context
from opentelemetry.propagate import extract

from kestrl.errors import Boundary, Failure, KestrlError
from kestrl.plan.settings import LearnerSettings
from kestrl.storage import AdapterManifest, fetch_adapter, open_store
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner import past
from kestrl_learner.aio import Interrupted, abandonable, guarded, unless
from kestrl_learner.context import Context
from kestrl_learner.model import PolicyModel
from kestrl_learner.progress import Progress
from kestrl_learner.runstore import DRAIN_SECONDS, Patience, RunStore
from kestrl_learner.training import Training

log = logging.getLogger(__name__)


class Run:
    """One run of one job. Nothing is read before `main`, so that watchers can be served from the start."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        algorithm = settings.algorithm
        self.progress = Progress(0, len(settings.engines), algorithm.groups_per_step * algorithm.group_size)
        """For those who watch."""
        self._drain = asyncio.Event()
        self._patience = Patience(settings.storage_seconds)
        self._context: Context | None = None
        self._training: Training | None = None

    @property
    def training(self) -> bool:
        """Whether training has begun: there may be something to finish and to checkpoint."""
        return self._training is not None

    def drain(self) -> None:
        """Finish the step at hand, checkpoint, end. A run that has ended stays as it ended."""
        if self.progress.final:
            return
        self._drain.set()
        self._patience.hurry(DRAIN_SECONDS)
        if self._training is not None:
            self._training.drain()
        self.progress.update(phase="draining", message="finishing the step at hand")

    def abandon(self) -> None:
        """Nothing that is waited for in a thread is waited for any longer: the run is being cancelled."""
        self._patience.hurry()

    async def main(self) -> None:
        """The whole run. Its end, good or bad, is told to watchers and written to `summary.json`.

        Raises:
            KestrlError: It failed.
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
            self.abandon()
            self._context = self._training = None  # what is told from now on needs neither model nor data

    async def _failed(self, failure: Failure) -> None:
        """Reports the failure to watchers and writes the summary."""
        self._nobody_looks()
        self.progress.update(phase="failed", failure=failure, message=failure.message[:300])
        if self._context is not None:
            await self._context.write_summary("failed", reason=str(failure))

    def _attributes(self) -> dict[str, str]:
        return {Attr.JOB: self.settings.job, Attr.RUN: self.settings.run}

    def _nobody_looks(self) -> None:
        """At the end: what was seen of engines and workers is not claimed of what they are later."""
        self.progress.update(engines=(), workers=0, groups_running=0, groups_ready=0, eta_seconds=0.0)

    async def _run(self) -> None:
        settings, progress = self.settings, self.progress
        progress.begin()
        progress.update(message="reading the data")
        context = self._context = await abandonable(self._read, name="read-data")
        progress.update(total_steps=context.steps)
        if settings.evaluate is None and await self._has_ended(context):
            return
        context.connect()
        progress.update(message="loading the model; engines start")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        watching = [
            asyncio.create_task(context.engines.watch(), name="watch-engines"),
            asyncio.create_task(context.workers.watch(), name="watch-workers"),
        ]
        status, message = "succeeded", ""
        try:
            await guarded(self._work(context), *watching)
        except Interrupted:
            # Nothing has been learned that a checkpoint does not hold: `Training` sees to that.
            status, message = "suspended", f"at step {progress.step}"
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await context.close()
        await context.write_summary(status)
        self._nobody_looks()
        progress.update(phase=status, message=message)

    def _read(self) -> Context:
        settings, progress = self.settings, self.progress
        store = RunStore(
            settings.storage,
            patience=self._patience,
            refused=lambda why: progress.update_soon(storage_failure=why),
            waiting=lambda why: progress.update_soon(storage_wait=why),
        )
        return Context(settings, progress, self._drain, store)

    async def _has_ended(self, context: Context) -> bool:
        """Looks at how far earlier processes of the run came; where the program lingers, a run that has succeeded is not run again."""
        settings = self.settings
        newest = await asyncio.to_thread(past.reached, context.store)
        if newest is None:
            return False
        self.progress.update(step=newest.step, checkpoint_step=newest.step)
        if not settings.keep_alive:
            return False
        told = await asyncio.to_thread(
            past.ended, context.store, newest, job=settings.job, digest=context.digest, steps=context.steps
        )
        if told is not None:
            log.info("run %s has succeeded already", settings.run)
            self.progress.update(phase="succeeded", **told)
        return told is not None

    async def _work(self, context: Context) -> None:
        model = await self._loaded(context)
        if self.settings.evaluate is not None:
            await self._evaluate(context, model, self.settings.evaluate.adapter)
        else:
            self._training = Training(context, model)
            if self._drain.is_set():
                self._training.drain()
            await self._training.run()

    async def _loaded(self, context: Context) -> PolicyModel:
        """The model, loaded while the workers come up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(abandonable(self._load, name="load-model"), name="load-model")
                tasks.create_task(unless(self._drain, context.workers.connect()), name="connect-workers")
        except* KestrlError as errors:
            raise errors.exceptions[0] from errors
        except* Interrupted:
            raise Interrupted from None
        return loading.result()

    def _load(self) -> PolicyModel:
        settings = self.settings
        return PolicyModel(
            settings.model,
            dtype=settings.dtype,
            rank=settings.rank,
            alpha=settings.alpha,
            targets=settings.targets,
            seed=settings.seed,
            device=settings.device,
        )

    async def _evaluate(self, context: Context, model: PolicyModel, address: str | None) -> None:
        """Evaluates one adapter, or the base model as the adapter that changes nothing."""
        if address is None:
            policy = await context.publish(model, 0, None)
        else:
            known = await asyncio.to_thread(_known_adapter, address)
            policy = known.policy
            await unless(self._drain, context.engines.publish(policy, address, parent=known.parent))
            context.newest = policy, address
        context.facts["after"] = await context.evaluate(policy, sampled=True, when=policy.name)


def _known_adapter(address: str) -> AdapterManifest:
    with TemporaryDirectory() as folder:
        return fetch_adapter(open_store(address), Path(folder) / "adapter")


@contextmanager
def _traced(parent: str | None) -> Generator[None]:
    """Within the trace that a W3C header names, if one is given."""
    token = otel_context.attach(extract({} if parent is None else {"traceparent": parent}))
    try:
        yield
    finally:
        otel_context.detach(token)


class Stay:
    """A run, and where it is to linger, what is left of the program after it: watchers are still told how it ended."""

    def __init__(self, run: Run) -> None:
        self._run, self._go = run, asyncio.Event()
        self._cut_short = False

    def go(self) -> bool:
        """The program is to end; returns whether that cuts the run short."""
        self._cut_short = not self._run.progress.final
        self._go.set()
        return self._cut_short

    async def main(self) -> None:
        """The run, and then as long as it is to stay.

        Raises:
            KestrlError: The run failed, and nobody stays to tell, or it was being cut short.
        """
        try:
            await self._until_told()
            if self._run.settings.keep_alive:
                _let_go(self._run.settings.device)
                await self._go.wait()
        finally:
            self._run.progress.end()

    async def _until_told(self) -> None:
        try:
            await self._run.main()
        except KestrlError as error:
            if self._cut_short or not self._run.settings.keep_alive:
                raise
            log.error("the run has failed: %s", error.failure())


def _let_go(device: str) -> None:
    """Frees what nothing refers to any more: the model, for others on its device."""
    gc.collect()
    if device != "cpu":
        torch.accelerator.empty_cache()
