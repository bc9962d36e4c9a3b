"""A run from start to end: load, publish, evaluate, then collect, train, publish, step after step; checkpoint; summary."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch

from kestrl.data import load_scenarios
from kestrl.episode import PolicyVersion, Scenario
from kestrl.errors import Boundary, KestrlError, StorageError, UserInputError
from kestrl.plan.settings import LearnerSettings
from kestrl.storage import AdapterManifest, ObjectStore, fetch_adapter, open_store
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner import adapters, checkpoint
from kestrl_learner.aio import Interrupted, unless
from kestrl_learner.batch import train_group
from kestrl_learner.collect import Collector, Ready
from kestrl_learner.engines import Engines
from kestrl_learner.evaluate import evaluate, store_groups
from kestrl_learner.facts import build_summary, identity_digest, merged_gap, step_facts
from kestrl_learner.ledger import Ledger
from kestrl_learner.model import PolicyModel
from kestrl_learner.progress import Progress
from kestrl_learner.schedule import total_steps
from kestrl_learner.trainer import StepResult, Trainer
from kestrl_learner.workers import Workers

log = logging.getLogger(__name__)


class GapAlarm(KestrlError):
    """Learner and engines disagree on what the newest policy would say: the rollouts are not of this policy."""

    boundary = Boundary.ENGINE
    code = "logprob_gap"


class Run:
    """One run of one job."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.store: ObjectStore = open_store(settings.storage)
        self.scenarios = load_scenarios(Path(settings.data.path), size=settings.data.size)
        self.validation: Sequence[Scenario] = (
            load_scenarios(Path(settings.validation.path), size=settings.validation.size) if settings.validation else ()
        )
        self.steps = total_steps(
            len(self.scenarios), settings.epochs, settings.algorithm.groups_per_step, settings.max_steps
        )
        if settings.evaluate is not None and not self.validation:
            raise UserInputError("data.validation: there is nothing to evaluate on; add it to the manifest")
        if self.steps == 0:
            raise UserInputError(
                f"data.train: {len(self.scenarios)} scenarios x {settings.epochs} epochs do not fill one step of "
                f"{settings.algorithm.groups_per_step} groups; lower algorithm.groupsPerStep"
            )
        self._digest = identity_digest(settings, self.scenarios)
        self.progress = Progress(self.steps, len(settings.engines))
        self._facts: dict[str, Any] = {"seconds": 0.0, "before": None}
        self._began = time.monotonic()
        self._step_seconds: list[float] = []
        self._done = 0
        """Steps that the ledger knows."""
        self._weights = 0
        """Steps that the weights have seen."""
        self._newest: tuple[PolicyVersion, str] | None = None
        self._drain = asyncio.Event()
        self._collector: Collector | None = None

    @property
    def training(self) -> bool:
        """Whether steps have begun."""
        return self._collector is not None

    def drain(self) -> None:
        """Finish the step at hand, checkpoint, end."""
        self._drain.set()
        self.progress.update(phase="draining", message="finishing the step at hand")
        if self._collector is not None:
            self._collector.draining = True
            self.progress.update()

    async def main(self) -> None:
        """The whole run. Its end, good or bad, is told to watchers and written to `summary.json`."""
        try:
            with span(SpanName.JOB, {Attr.JOB: self.settings.job, Attr.RUN: self.settings.run}):
                await self._run()
        except KestrlError as error:
            self.progress.update(phase="failed", failure=error.failure(component="learner-0"), message=str(error)[:300])
            self._write_summary("failed", self._newest, reason=str(error.failure(component="learner-0")))
            raise
        finally:
            self.progress.update(ended=True)
            await asyncio.sleep(0)  # watchers get their last word

    async def _run(self) -> None:
        settings = self.settings
        workers = Workers(settings)
        engines = Engines(settings.engines, self.progress, settings.start_seconds)
        self.progress.update(message="loading the model; engines start")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        watching = [
            asyncio.create_task(engines.watch(), name="watch-engines"),
            asyncio.create_task(workers.watch(), name="watch-workers"),
        ]
        try:
            await self._guarded(self._work(workers, engines), *watching)
        except Interrupted:
            # Nothing has been trained that a checkpoint does not hold: `_train` sees to that.
            self._write_summary("suspended", self._newest)
            self.progress.update(phase="suspended", message=f"at step {self.progress.step}")
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await workers.close()
            await engines.close()

    async def _work(self, workers: Workers, engines: Engines) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(asyncio.to_thread(self._load), name="load-model")
                tasks.create_task(unless(self._drain, workers.connect()), name="connect-workers")
        except* KestrlError as errors:
            raise errors.exceptions[0] from errors
        except* Interrupted:
            raise Interrupted from None
        if self.settings.evaluate is not None:
            await unless(self._drain, self._only_evaluate(loading.result(), workers, engines))
        else:
            await self._train(loading.result(), workers, engines)

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

    async def _publish(
        self, model: PolicyModel, step: int, parent: str | None, engines: Engines
    ) -> tuple[PolicyVersion, str]:
        with span(SpanName.PUBLISH, {Attr.STEP: step}):
            manifest, uri = await asyncio.to_thread(
                lambda: adapters.publish(
                    self.store, model, job=self.settings.job, step=step, base=self.settings.model, parent=parent
                )
            )
            await unless(self._drain, engines.publish(manifest.policy, uri))
            return manifest.policy, uri

    async def _only_evaluate(self, model: PolicyModel, workers: Workers, engines: Engines) -> None:
        """Evaluates one adapter, or the base model as the adapter that changes nothing."""
        assert self.settings.evaluate is not None
        address = self.settings.evaluate.adapter
        if address is None:
            policy, uri = await self._publish(model, 0, None, engines)
        else:
            manifest = await asyncio.to_thread(self._known_adapter, address)
            policy, uri = manifest.policy, address
            await engines.publish(policy, uri)
        self.progress.update(phase="evaluating", message=f"{len(self.validation)} held-out scenarios")
        after = await self._evaluate(policy, workers, engines, sampled=True)
        self.progress.update(phase="succeeded")
        self._facts["after"] = after
        self._write_summary("succeeded", (policy, uri))

    def _known_adapter(self, address: str) -> AdapterManifest:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            return fetch_adapter(open_store(address), Path(folder) / "adapter")

    async def _evaluate(
        self, policy: PolicyVersion, workers: Workers, engines: Engines, *, sampled: bool
    ) -> dict[str, float] | None:
        if not self.validation:
            return None
        work = evaluate(
            self.validation,
            run=self.settings.run,
            policy=policy,
            temperature=self.settings.temperature,
            seed=self.settings.seed,
            sampled=sampled,
            workers=workers,
            engines=engines,
            progress=self.progress,
            store=self.store,
        )
        return await unless(self._drain, work)

    def _published(self) -> tuple[PolicyVersion, str]:
        assert self._newest is not None, "version 0 is published before anything asks for one"
        return self._newest

    async def _train(self, model: PolicyModel, workers: Workers, engines: Engines) -> None:
        settings = self.settings
        trainer = Trainer(model, settings.algorithm, settings.temperature)
        ledger = Ledger(settings.database, seed=settings.seed, size=len(self.scenarios), epochs=settings.epochs)
        try:
            self._done = self._weights = await asyncio.to_thread(self._resume, trainer, ledger)
            await self._lead_through(model, trainer, ledger, workers, engines)
        except UserInputError:
            raise
        except (Interrupted, KestrlError) as cause:
            await self._keep_what_was_learned(trainer, cause)
            raise
        finally:
            ledger.close()

    async def _keep_what_was_learned(self, trainer: Trainer, cause: Exception) -> None:
        """A checkpoint of the last step on which weights and ledger agree. The cause is told, even where this fails too."""
        if self._weights != self._done:
            return
        try:
            await asyncio.to_thread(self._checkpoint, trainer, self._done)
        except KestrlError as error:
            if isinstance(cause, Interrupted):
                raise
            log.error("step %d cannot be checkpointed: %s", self._done, error)

    async def _lead_through(
        self, model: PolicyModel, trainer: Trainer, ledger: Ledger, workers: Workers, engines: Engines
    ) -> None:
        """Before, between and after.

        Raises:
            Interrupted: It was told to drain.
        """
        settings = self.settings
        self._newest = policy, _ = await self._publish(model, self._done, None, engines)
        if self._facts["before"] is None and self.validation:
            self.progress.update(phase="evaluating", message=f"{len(self.validation)} held-out scenarios, before")
            self._facts["before"] = await self._evaluate(policy, workers, engines, sampled=True)
            await asyncio.to_thread(self._checkpoint, trainer, self._done)
        collector = Collector(
            settings, self.scenarios, ledger, workers, engines, self.progress, model.vocabulary, steps=self.steps
        )
        self._collector = collector
        collector.draining = self._drain.is_set()
        engines.on_change = workers.on_change = collector.wake
        collector.begin(policy, self._done * settings.algorithm.groups_per_step)
        self.progress.update(phase="training", step=self._done, message="")
        feeding = asyncio.create_task(collector.feed(), name="feed")
        try:
            await self._guarded(self._steps(model, trainer, ledger, collector, workers, engines), feeding)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        await self._finish(ledger, workers, engines)

    async def _guarded(self, work: Coroutine[Any, Any, None], *guards: asyncio.Task[None]) -> None:
        """Does the work; a guard that ends first ends the work, and its error is the error."""
        main = asyncio.create_task(work)
        try:
            await asyncio.wait([main, *guards], return_when=asyncio.FIRST_COMPLETED)
            for guard in guards:
                if guard.done():
                    guard.result()
            await main
        finally:
            main.cancel()
            await asyncio.wait([main])

    async def _steps(
        self,
        model: PolicyModel,
        trainer: Trainer,
        ledger: Ledger,
        collector: Collector,
        workers: Workers,
        engines: Engines,
    ) -> None:
        settings = self.settings
        while self._done < self.steps:
            policy, began = self._published()[0], time.monotonic()
            with span(SpanName.STEP, {Attr.STEP: self._done, Attr.POLICY: policy.name}):
                ready = await collector.take(self._done)
                if self._drain.is_set() and not ready:
                    raise Interrupted
                if not ready:
                    break
                collected = time.monotonic()
                result = await self._update(trainer, ready, policy, self._done)
                trained = time.monotonic()
                # The ledger first: from here on weights and ledger agree, and a checkpoint may be made at any time.
                ledger.train([item.lease for item in ready], self._done + 1)
                self._done += 1
                await self._record(ready, result, began, collected, trained)
                self._newest = policy, _ = await self._publish(model, self._done, policy.name, engines)
            if self._done % settings.checkpoint_every == 0 or self._done == self.steps:
                await asyncio.to_thread(self._checkpoint, trainer, self._done)
            if settings.eval_every and self._done % settings.eval_every == 0 and self._done < self.steps:
                await self._evaluate(policy, workers, engines, sampled=False)
            collector.advance(policy)
            await self._retire(engines, collector, policy)

    async def _record(
        self, ready: Sequence[Ready], result: StepResult, began: float, collected: float, trained: float
    ) -> None:
        groups = [item.group for item in ready]
        path = f"episodes/train/{self._done - 1:06d}.pb"
        await asyncio.to_thread(store_groups, self.store, path, self._done - 1, "train", groups)
        self._told(self._done, ready, result, began, collected, trained)

    async def _retire(self, engines: Engines, collector: Collector, policy: PolicyVersion) -> None:
        kept = collector.named() | {policy.name}
        await engines.retire({name for name in engines.wanted() if name not in kept})

    async def _update(self, trainer: Trainer, ready: Sequence[Ready], policy: PolicyVersion, done: int) -> StepResult:
        groups = [train_group(item.group, self.settings.algorithm.advantage, policy.name) for item in ready]
        with span(SpanName.UPDATE, {Attr.STEP: done}):
            result = await asyncio.to_thread(trainer.step, groups, done)
        self._weights = done + 1
        gap = result.gap
        self._facts["gap"] = merged_gap(self._facts.get("gap"), gap)
        if gap.fresh_mean > self.settings.logprob_gap_bound:
            engines = sorted(
                {turn.engine for item in ready for episode in item.group.episodes for turn in episode.turns}
            )
            raise GapAlarm(
                f"step {done}: learner and engines ({', '.join(engines)}) differ by {gap.fresh_mean:.3g} nats a token on "
                f"{policy.name}, bound {self.settings.logprob_gap_bound:g}: the engines do not sample from this policy"
            )
        return result

    def _told(
        self, done: int, ready: Sequence[Ready], result: StepResult, began: float, collected: float, trained: float
    ) -> None:
        now = time.monotonic()
        self._step_seconds.append(now - began)
        recent = self._step_seconds[-10:]
        pace = sum(recent) / len(recent)
        facts = step_facts(done, [item.group for item in ready], result) | {
            "staleness": max(done - 1 - item.policy.step for item in ready),
            "seconds": {"collect": collected - began, "update": trained - collected, "rest": now - trained},
        }
        self.store.put(f"metrics/{done:06d}.json", json.dumps(facts).encode())
        log.info("step %d: %s", done, facts)
        self.progress.update(
            step=done,
            tokens_per_second=result.sampled / (now - began),
            eta_seconds=pace * (self.steps - done),
            message=f"rollouts {collected - began:.1f} s, update {trained - collected:.1f} s",
        )

    def _checkpoint(self, trainer: Trainer, done: int) -> None:
        with span(SpanName.CHECKPOINT, {Attr.STEP: done}):
            facts = {
                **self._facts,
                "digest": self._digest,
                "seconds": self._seconds(),
                "failures": dict(self.progress.failures),
            }
            checkpoint.write(
                self.store,
                checkpoint.Checkpoint(step=done, state=trainer.state(), facts=facts),
                keep=self.settings.keep_checkpoints,
            )

    def _seconds(self) -> float:
        return float(self._facts["seconds"]) + time.monotonic() - self._began

    def _resume(self, trainer: Trainer, ledger: Ledger) -> int:
        """Goes on from the newest checkpoint: the trained frontier; returns the steps done."""
        known = checkpoint.newest(self.store)
        if known is None:
            ledger.rewind(0)
            return 0
        if known.facts.get("digest", self._digest) != self._digest:
            raise UserInputError(
                f"run {self.settings.run} was trained with another model, algorithm or data than the manifest now names; "
                f"start a new run, or restore what was changed"
            )
        trainer.restore(known.state)
        self._facts |= known.facts
        self.progress.failures.update(known.facts.get("failures", {}))
        again = ledger.rewind(known.step)
        log.info("resumed at step %d; %d scenarios are pending again", known.step, again)
        return known.step

    async def _finish(self, ledger: Ledger, workers: Workers, engines: Engines) -> None:
        after = None
        if self.validation:
            self.progress.update(phase="evaluating", message=f"{len(self.validation)} held-out scenarios, after")
            after = await self._evaluate(self._published()[0], workers, engines, sampled=True)
        self._facts["after"] = after
        ledger.close_books()
        self._write_summary("succeeded", self._newest, steps=self._done)
        self.progress.update(phase="succeeded", message="")

    def _write_summary(
        self, status: str, newest: tuple[PolicyVersion, str] | None, *, steps: int | None = None, reason: str = ""
    ) -> None:
        summary = build_summary(
            self._facts,
            status=status,
            reason=reason,
            steps=self.progress.step if steps is None else steps,
            newest=newest,
            seconds=self._seconds(),
            failures=self.progress.failures,
            gap_bound=self.settings.logprob_gap_bound,
        )
        try:
            self.store.put("summary.json", json.dumps(summary, indent=2).encode())
        except StorageError as error:
            log.error("the summary cannot be written: %s", error)
            if status != "failed":
                raise
