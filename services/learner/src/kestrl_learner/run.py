"""A run from start to end: load, publish, evaluate, then collect, train, publish, step after step; checkpoint; summary."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kestrl.data import load_scenarios
from kestrl.episode import PolicyVersion, Scenario
from kestrl.errors import Boundary, KestrlError, StorageError
from kestrl.plan.settings import LearnerSettings
from kestrl.storage import AdapterManifest, ObjectStore, fetch_adapter, open_store
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner import adapters, checkpoint
from kestrl_learner.batch import train_group
from kestrl_learner.collect import Collector, Ready
from kestrl_learner.engines import Engines
from kestrl_learner.evaluate import evaluate, store_groups
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
        self.progress = Progress(self.steps, len(settings.engines))
        self._facts: dict[str, Any] = {"seconds": 0.0, "before": None}
        self._began = time.monotonic()
        self._step_seconds: list[float] = []
        self._gap: dict[str, float] = {}
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
            self._write_summary("failed", None, reason=str(error.failure(component="learner-0")))
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
        try:
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(asyncio.to_thread(self._load), name="load-model")
                tasks.create_task(workers.connect(), name="connect-workers")
            model = loading.result()
            if settings.evaluate is not None:
                await self._only_evaluate(model, workers, engines)
            else:
                await self._train(model, workers, engines)
        except* KestrlError as errors:
            raise errors.exceptions[0] from errors
        finally:
            await workers.close()
            await engines.close()

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
        self, model: PolicyModel, step: int, parent: str | None, engines: Engines, *, first: bool = False
    ) -> tuple[PolicyVersion, str]:
        with span(SpanName.PUBLISH, {Attr.STEP: step}):
            manifest, uri = await asyncio.to_thread(
                lambda: adapters.publish(
                    self.store, model, job=self.settings.job, step=step, base=self.settings.model, parent=parent
                )
            )
            await engines.publish(manifest.policy, uri, first=first)
            return manifest.policy, uri

    async def _only_evaluate(self, model: PolicyModel, workers: Workers, engines: Engines) -> None:
        """Evaluates one adapter, or the base model as the adapter that changes nothing."""
        assert self.settings.evaluate is not None
        address = self.settings.evaluate.adapter
        if address is None:
            policy, uri = await self._publish(model, 0, None, engines, first=True)
        else:
            manifest = await asyncio.to_thread(self._known_adapter, address)
            policy, uri = manifest.policy, address
            await engines.publish(policy, uri, first=True)
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
        return await evaluate(
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

    async def _train(self, model: PolicyModel, workers: Workers, engines: Engines) -> None:
        settings = self.settings
        trainer = Trainer(model, settings.algorithm, settings.temperature)
        ledger = Ledger(settings.database, seed=settings.seed, size=len(self.scenarios), epochs=settings.epochs)
        done = await asyncio.to_thread(self._resume, trainer, ledger)
        policy, uri = await self._publish(model, done, None, engines, first=True)
        if self._facts["before"] is None and self.validation:
            self.progress.update(phase="evaluating", message=f"{len(self.validation)} held-out scenarios, before")
            self._facts["before"] = await self._evaluate(policy, workers, engines, sampled=True)
            await asyncio.to_thread(self._checkpoint, trainer, done)
        collector = Collector(settings, self.scenarios, ledger, workers, engines, self.progress)
        self._collector = collector
        collector.draining = self._drain.is_set()
        engines.on_change = collector.wake
        collector.begin(policy, done * settings.algorithm.groups_per_step)
        self.progress.update(phase="training", step=done, message="")
        feeding = asyncio.create_task(collector.feed(), name="feed")
        watching = asyncio.create_task(engines.watch(), name="watch-engines")
        try:
            policy, uri, done = await self._guarded(
                self._steps(model, trainer, ledger, collector, workers, engines, (policy, uri), done), feeding, watching
            )
        finally:
            for task in (feeding, watching):
                task.cancel()
            await asyncio.wait([feeding, watching])
        await self._finish(trainer, ledger, workers, engines, (policy, uri), done)
        ledger.close()

    async def _guarded(self, work: Any, *guards: asyncio.Task[None]) -> Any:
        """The work's result; a guard that ends first ends the work, and its error is the error."""
        main = asyncio.ensure_future(work)
        await asyncio.wait([main, *guards], return_when=asyncio.FIRST_COMPLETED)
        for guard in guards:
            if guard.done():
                main.cancel()
                await asyncio.wait([main])
                guard.result()
        return await main

    async def _steps(
        self,
        model: PolicyModel,
        trainer: Trainer,
        ledger: Ledger,
        collector: Collector,
        workers: Workers,
        engines: Engines,
        newest: tuple[PolicyVersion, str],
        done: int,
    ) -> tuple[PolicyVersion, str, int]:
        settings = self.settings
        policy, uri = newest
        while done < self.steps and not self._drain.is_set():
            began = time.monotonic()
            with span(SpanName.STEP, {Attr.STEP: done, Attr.POLICY: policy.name}):
                ready = await collector.take(done)
                if not ready:
                    break
                collected = time.monotonic()
                result = await self._update(trainer, ready, policy, done)
                trained = time.monotonic()
                await asyncio.to_thread(
                    store_groups,
                    self.store,
                    f"episodes/train/{done:06d}.pb",
                    done,
                    "train",
                    [item.group for item in ready],
                )
                done += 1
                before = policy
                policy, uri = await self._publish(model, done, before.name, engines)
                ledger.train([item.lease for item in ready], done)
            self._told(done, ready, result, began, collected, trained)
            if done % settings.checkpoint_every == 0 or done == self.steps:
                await asyncio.to_thread(self._checkpoint, trainer, done)
            if settings.eval_every and done % settings.eval_every == 0 and done < self.steps:
                await self._evaluate(policy, workers, engines, sampled=False)
            collector.advance(policy)
            await self._retire(engines, collector, policy)
        return policy, uri, done

    async def _retire(self, engines: Engines, collector: Collector, policy: PolicyVersion) -> None:
        kept = collector.named() | {policy.name}
        await engines.retire({name for name in engines.wanted() if name not in kept})

    async def _update(self, trainer: Trainer, ready: Sequence[Ready], policy: PolicyVersion, done: int) -> StepResult:
        groups = [train_group(item.group, self.settings.algorithm.advantage, policy.name) for item in ready]
        with span(SpanName.UPDATE, {Attr.STEP: done}):
            result = await asyncio.to_thread(trainer.step, groups, done)
        gap = result.gap
        self._gap = {
            "mean": gap.mean,
            "p99": gap.p99,
            "max": gap.max,
            "ess": gap.ess,
            "bound": self.settings.logprob_gap_bound,
        }
        worst = max(self._facts.get("worst_gap", 0.0), gap.max)
        self._facts["worst_gap"] = worst
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
        episodes = [episode for item in ready for episode in item.group.episodes]
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        facts = {
            "step": done,
            "episodes": len(episodes),
            "reward": sum(rewards) / len(rewards),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "gap": asdict(result.gap),
            "idle_groups": result.idle_groups,
            "sampled_tokens": result.sampled,
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
            facts = {**self._facts, "seconds": self._seconds(), "failures": dict(self.progress.failures)}
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
        trainer.restore(known.state)
        self._facts |= known.facts
        self.progress.failures.update(known.facts.get("failures", {}))
        again = ledger.rewind(known.step)
        log.info("resumed at step %d; %d scenarios are pending again", known.step, again)
        return known.step

    async def _finish(
        self,
        trainer: Trainer,
        ledger: Ledger,
        workers: Workers,
        engines: Engines,
        newest: tuple[PolicyVersion, str],
        done: int,
    ) -> None:
        if done < self.steps and self._drain.is_set():
            await asyncio.to_thread(self._checkpoint, trainer, done)
            self._write_summary("suspended", newest, steps=done)
            self.progress.update(phase="suspended", message=f"checkpointed at step {done}")
            return
        after = None
        if self.validation:
            self.progress.update(phase="evaluating", message=f"{len(self.validation)} held-out scenarios, after")
            after = await self._evaluate(newest[0], workers, engines, sampled=True)
        self._facts["after"] = after
        ledger.close_books()
        self._write_summary("succeeded", newest, steps=done)
        self.progress.update(phase="succeeded", message="")

    def _write_summary(
        self, status: str, newest: tuple[PolicyVersion, str] | None, *, steps: int | None = None, reason: str = ""
    ) -> None:
        summary: dict[str, Any] = {
            "status": status,
            "steps": self.progress.step if steps is None else steps,
            "before": self._facts.get("before"),
            "after": self._facts.get("after"),
            "policy": None
            if newest is None
            else {"version": newest[0].name, "sha256": newest[0].sha256, "uri": newest[1]},
            "seconds": self._seconds(),
            "logprob_gap": {**self._gap, "worst": self._facts.get("worst_gap", 0.0)},
            "failures": dict(Counter(self.progress.failures)),
            "reason": reason,
        }
        try:
            self.store.put("summary.json", json.dumps(summary, indent=2).encode())
        except StorageError as error:
            log.error("the summary cannot be written: %s", error)
            if status != "failed":
                raise
