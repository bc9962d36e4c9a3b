"""A run from start to end: connect, load, then train or evaluate; whatever happens, watchers and `summary.json` are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kestrl.errors import KestrlError
from kestrl.plan.settings import LearnerSettings
from kestrl.storage import AdapterManifest, fetch_adapter, open_store
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner.aio import Interrupted, guarded, unless
from kestrl_learner.context import Context
from kestrl_learner.model import PolicyModel
from kestrl_learner.progress import Progress
from kestrl_learner.training import Training


class Run:
    """One run of one job."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self._context = Context(settings)
        self._training: Training | None = None

    @property
    def progress(self) -> Progress:
        """For those who watch."""
        return self._context.progress

    @property
    def training(self) -> bool:
        """Whether training has begun: there may be something to finish and to checkpoint."""
        return self._training is not None

    def drain(self) -> None:
        """Finish the step at hand, checkpoint, end."""
        self._context.drain.set()
        if self._training is not None:
            self._training.drain()
        self.progress.update(phase="draining", message="finishing the step at hand")

    async def main(self) -> None:
        """The whole run. Its end, good or bad, is told to watchers and written to `summary.json`."""
        try:
            with span(SpanName.JOB, {Attr.JOB: self.settings.job, Attr.RUN: self.settings.run}):
                await self._run()
        except KestrlError as error:
            failure = error.failure(component="learner-0")
            self.progress.update(phase="failed", failure=failure, message=str(error)[:300])
            await self._context.write_summary("failed", reason=str(failure))
            raise
        finally:
            self.progress.update(ended=True)
            await asyncio.sleep(0)  # watchers get their last word

    async def _run(self) -> None:
        context = self._context
        context.connect()
        context.progress.update(message="loading the model; engines start")
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        watching = [
            asyncio.create_task(context.engines.watch(), name="watch-engines"),
            asyncio.create_task(context.workers.watch(), name="watch-workers"),
        ]
        try:
            await guarded(self._work(), *watching)
        except Interrupted:
            # Nothing has been learned that a checkpoint does not hold: `Training` sees to that.
            await context.write_summary("suspended")
            context.progress.update(phase="suspended", message=f"at step {context.progress.step}")
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await context.close()

    async def _work(self) -> None:
        context = self._context
        model = await self._loaded()
        if self.settings.evaluate is not None:
            await self._evaluate(model, self.settings.evaluate.adapter)
        else:
            self._training = Training(context, model)
            if context.drain.is_set():
                self._training.drain()
            await self._training.run()
        await context.write_summary("succeeded")
        context.progress.update(phase="succeeded", message="")

    async def _loaded(self) -> PolicyModel:
        """The model, loaded while the workers come up."""
        context = self._context
        try:
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(asyncio.to_thread(self._load), name="load-model")
                tasks.create_task(unless(context.drain, context.workers.connect()), name="connect-workers")
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

    async def _evaluate(self, model: PolicyModel, address: str | None) -> None:
        """Evaluates one adapter, or the base model as the adapter that changes nothing."""
        context = self._context
        if address is None:
            policy = await context.publish(model, 0, None)
        else:
            policy = (await asyncio.to_thread(_known_adapter, address)).policy
            await unless(context.drain, context.engines.publish(policy, address))
            context.newest = policy, address
        context.facts["after"] = await context.evaluate(policy, sampled=True, when=policy.name)


def _known_adapter(address: str) -> AdapterManifest:
    with TemporaryDirectory() as folder:
        return fetch_adapter(open_store(address), Path(folder) / "adapter")
