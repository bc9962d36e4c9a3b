"""Training: resume, evaluate, then collect, update, publish, step after step, and evaluate again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from functools import partial

from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, KestrlError, UserInputError
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner import checkpoint
from kestrl_learner.aio import Interrupted, guarded
from kestrl_learner.batch import train_batch
from kestrl_learner.collect import Collector, Ready
from kestrl_learner.context import Context
from kestrl_learner.evaluate import store_groups
from kestrl_learner.facts import step_facts
from kestrl_learner.gap import merged
from kestrl_learner.learning import tallied
from kestrl_learner.ledger import Ledger, LedgerError, Superseded
from kestrl_learner.model import PolicyModel
from kestrl_learner.progress import STEPS_SEEN
from kestrl_learner.retention import forget_adapters, forget_episodes
from kestrl_learner.stale import Stale
from kestrl_learner.trainer import StepResult, Trainer

log = logging.getLogger(__name__)
PACE_STEPS = 10
"""Steps whose mean duration foretells the rest."""


class GapAlarm(KestrlError):
    """Learner and engines disagree on what a policy would say: the rollouts are not of this policy."""

    boundary = Boundary.ENGINE
    code = "logprob_gap"


def refuse_if_superseded(ledger: Ledger) -> None:
    """The fence of the run's storage.

    A database that does not answer stops no writing: what a replaced learner wrote is skipped by the next resume.

    Raises:
        Superseded: Another learner owns the run.
    """
    try:
        ledger.check_owner()
    except Superseded:
        raise
    except KestrlError as error:
        log.warning("whether this learner still owns the run is not known: %s", error)


class Training:
    """The training of one run. Make it in the running loop; `run` it once."""

    def __init__(self, context: Context, model: PolicyModel) -> None:
        self._context, self._settings, self._model = context, context.settings, model
        self._trainer = Trainer(model, self._settings.algorithm, self._settings.temperature)
        self._ledger = Ledger(
            self._settings.database,
            seed=self._settings.seed,
            size=len(context.scenarios),
            epochs=self._settings.epochs,
            run=self._settings.run,
        )
        # Of the ledger alone: a method of this object would make a cycle that keeps the model until the next garbage collection.
        context.store.fence = partial(refuse_if_superseded, self._ledger)
        self._collector = Collector(
            self._settings,
            context.scenarios,
            self._ledger,
            context.workers,
            context.engines,
            context.progress,
            model.vocabulary,
            self._trainer.algorithm,
            steps=context.steps,
        )
        self._pace: list[float] = []
        self._done = 0
        """Steps that the ledger knows."""
        self._weights = 0
        """Steps that the weights have seen."""
        self._saved: int | None = None
        """The step of the newest checkpoint that is surely there."""

    def drain(self) -> None:
        """No further group is started."""
        self._collector.draining = True

    async def run(self) -> None:
        """From the newest checkpoint to the end.

        Raises:
            Interrupted: It was told to drain; a checkpoint holds all that was learned.
            KestrlError: It failed; a checkpoint holds all that was learned.
        """
        try:
            self._done = self._weights = await asyncio.to_thread(self._resume)
            policy = await self._before()
            await self._between(policy)
            await self._after()
        except UserInputError:
            raise
        except Exception as cause:  # whatever ends a run, what it learned is kept
            await self._keep_what_was_learned(cause)
            raise
        finally:
            self._ledger.close()

    def _resume(self) -> int:
        """Goes on from the newest checkpoint: the trained frontier; returns the steps done."""
        context = self._context
        known = checkpoint.newest(context.store, outdated=self._outdated)
        if known is None:
            self._refuse_foreign_storage()
            self._ledger.rewind(0)
            return 0
        if known.facts.get("digest", context.digest) != context.digest:
            raise UserInputError(
                f"run {self._settings.run} was trained with another model, algorithm or data than the manifest now names; "
                f"start a new run, or restore what was changed"
            )
        self._trainer.restore(known.state)
        context.facts |= known.facts
        context.progress.failures.update(known.facts.get("failures", {}))
        context.progress.skipped |= {(name, ordinal) for name, ordinal in known.facts.get("skipped", ())}
        context.progress.stale = Stale.of(known.facts.get("stale", {}))
        again = self._rewind(known.step)
        self._saved = known.step
        log.info("resumed at step %d; %d scenarios are pending again", known.step, again)
        return known.step

    def _outdated(self, made: checkpoint.Manifest) -> bool:
        """Whether the ledger says that a later owner resumed from before this checkpoint."""
        return self._ledger.outdated(made.step, made.facts.get("owner", 0))

    def _refuse_foreign_storage(self) -> None:
        """A ledger that knows of steps belongs to a storage that holds at least their versions.

        Raises:
            UserInputError: The storage is empty: it is another one, and training would begin anew unnoticed.
        """
        store, done = self._context.store, self._ledger.frontier()
        if done and not store.list("adapters"):
            raise UserInputError(
                f"the ledger holds a run at step {done}, and {store.uri} holds nothing of it; bring back the storage, or "
                f"start another run with another metadata.name"
            )

    def _rewind(self, step: int) -> int:
        try:
            return self._ledger.rewind(step)
        except LedgerError as error:
            if error.code != "ledger_behind":
                raise
            raise UserInputError(
                f"{self._context.store.uri} holds a run at step {step}, and its ledger is not here ({error}): what it trained on "
                f"would be trained on again; bring the ledger, or start another run with another storage.uri or metadata.name"
            ) from error

    async def _before(self) -> PolicyVersion:
        context = self._context
        policy = await self._publish(None)
        if context.facts["before"] is None and context.validation:
            context.facts["before"] = await context.evaluate(policy, sampled=True, when="before")
            await self._save()
        await self._evaluate_between(policy)
        return policy

    async def _between(self, policy: PolicyVersion) -> None:
        context, collector = self._context, self._collector
        context.engines.on_change = context.workers.on_change = collector.wake
        context.engines.on_load = collector.look_at_engines
        collector.begin(policy, self._done * self._settings.algorithm.groups_per_step)
        context.progress.update(phase="training", step=self._done, message="")
        feeding = asyncio.create_task(collector.feed(), name="feed")
        try:
            await guarded(self._steps(policy), feeding)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        if self._saved != self._done:  # the scenarios ran out between two checkpoints
            await self._save()

    async def _after(self) -> None:
        context = self._context
        assert context.newest is not None, "version 0 is published before anything asks for one"
        context.facts["after"] = await context.evaluate(context.newest[0], sampled=True, when="after")
        self._ledger.close_books()

    async def _evaluate_between(self, policy: PolicyVersion) -> None:
        """Every `evalEvery` steps; after a resume too, if the run was cut off before this step's evaluation was done."""
        context, every, done = self._context, self._settings.eval_every, self._done
        if not every or not done or done % every or done >= context.steps or str(done) in context.evaluations:
            return
        await context.evaluate(policy, sampled=False, when=f"step {done}")
        context.progress.update(phase="training")

    async def _keep_what_was_learned(self, cause: Exception) -> None:
        """A checkpoint of the last step on which weights and ledger agree. The cause is reported even where this fails too."""
        if self._weights != self._done or isinstance(cause, Superseded):
            return
        try:
            await asyncio.to_thread(self._checkpoint)
        except KestrlError as error:
            if isinstance(cause, Interrupted):
                raise
            log.error("step %d cannot be checkpointed: %s", self._done, error)

    async def _steps(self, policy: PolicyVersion) -> None:
        settings, context = self._settings, self._context
        while self._done < context.steps:
            began = time.monotonic()
            with span(SpanName.STEP, {Attr.STEP: self._done, Attr.POLICY: policy.name}):
                ready = await self._collector.take(self._done)
                if context.drain.is_set() and not ready:
                    raise Interrupted
                if not ready:
                    break
                collected = time.monotonic()
                result = await self._update(ready, policy)
                trained = time.monotonic()
                # The ledger first: from here on weights and ledger agree, and a checkpoint may be made at any time.
                self._ledger.train([item.lease for item in ready], self._done + 1)
                self._done += 1
                await self._record(ready, result, began, collected, trained)
                policy = await self._publish(policy.name)
            await self._evaluate_between(policy)
            if self._done % settings.checkpoint_every == 0 or self._done == context.steps:
                await self._save()
            self._collector.advance(policy)
            await self._retire(policy)
            await asyncio.to_thread(self._forget, self._collector.named() | context.engines.wanted() | {policy.name})

    async def _publish(self, parent: str | None) -> PolicyVersion:
        context = self._context
        policy = await context.publish(self._model, self._done, parent)
        if self._done == 0:
            context.facts["learning"] = {"first": policy.sha256}
        learning = context.learning()
        if learning is not None and (learning.learned or self._done >= min(STEPS_SEEN, context.steps)):
            if not learning.learned:
                log.warning("nothing is learned: %s", learning.message)
            context.progress.update(learning=learning)
        self._trainer.published(policy.name)
        return policy

    async def _update(self, ready: Sequence[Ready], policy: PolicyVersion) -> StepResult:
        groups = train_batch([item.group for item in ready], self._trainer.algorithm, policy.name)
        with span(SpanName.UPDATE, {Attr.STEP: self._done}):
            result = await asyncio.to_thread(self._trainer.step, groups, self._done)
        self._weights = self._done + 1
        gap, facts = result.gap, self._context.facts
        facts["gap"] = merged(facts.get("gap"), gap.own)
        alarms = gap.alarms(self._settings.gap_bounds)
        if alarms:
            raise GapAlarm(
                f"step {self._done}: learner and engine differ, in nats a token: {'; '.join(alarms)}. "
                "What such an engine samples is not of the policy it names"
            )
        return result

    async def _record(
        self, ready: Sequence[Ready], result: StepResult, began: float, collected: float, trained: float
    ) -> None:
        """Episodes, metrics and progress of a step."""
        context, done = self._context, self._done
        groups = [item.group for item in ready]
        path = f"episodes/train/{done - 1:06d}.pb"
        await asyncio.to_thread(store_groups, context.store, path, done - 1, "train", groups)
        now = time.monotonic()
        self._pace = [*self._pace, now - began][-PACE_STEPS:]
        facts = step_facts(done, groups, result) | {
            "staleness": max(done - 1 - item.policy.step for item in ready),
            "seconds": {"collect": collected - began, "update": trained - collected, "rest": now - trained},
            "stale": context.progress.stale_in_step.facts(),
        }
        context.progress.stale_in_step = Stale()
        context.facts["learning"] = tallied(context.facts.get("learning", {}), groups, result)
        await context.keep(f"metrics/{done:06d}.json", facts)
        log.info("step %d: %s", done, facts)
        context.progress.stepped(idle=result.idle_groups == len(groups))
        context.progress.update(
            step=done,
            last_step=facts,
            tokens_per_second=result.sampled / (now - began),
            episodes_per_second=sum(len(group.episodes) for group in groups) / (now - began),
            eta_seconds=sum(self._pace) / len(self._pace) * (context.steps - done),
            message=f"rollouts {collected - began:.1f} s, update {trained - collected:.1f} s",
        )

    async def _retire(self, policy: PolicyVersion) -> None:
        kept = self._collector.named() | {policy.name}
        engines = self._context.engines
        await engines.retire({name for name in engines.wanted() if name not in kept})

    def _forget(self, names: Collection[str]) -> None:
        settings, store = self._settings, self._context.store
        if settings.keep_adapters:
            forget_adapters(store, keep=settings.keep_adapters, names=names, steps=checkpoint.steps(store))
        if settings.keep_episodes:
            forget_episodes(store, keep=settings.keep_episodes)

    async def _save(self) -> None:
        """A checkpoint on the way. One that cannot be read back is told and ends nothing: the ones before it are still there."""
        try:
            await asyncio.to_thread(self._checkpoint)
        except checkpoint.Unconfirmed as error:
            log.error("%s", error)
        self._context.progress.update()

    def _checkpoint(self) -> None:
        context = self._context
        with span(SpanName.CHECKPOINT, {Attr.STEP: self._done}):
            facts = {
                **context.facts,
                "digest": context.digest,
                "owner": self._ledger.token,
                "seconds": context.seconds(),
                "failures": dict(context.progress.failures),
                "skipped": sorted(context.progress.skipped),
                "stale": context.progress.stale.facts(),
            }
            made = checkpoint.Checkpoint(step=self._done, state=self._trainer.state(), facts=facts)
            try:
                checkpoint.write(context.store, made, keep=self._settings.keep_checkpoints)
            except checkpoint.Unconfirmed as error:
                context.progress.storage_failure = str(error)
                raise
            self._saved = context.progress.checkpoint_step = made.step
            context.progress.storage_failure = ""
