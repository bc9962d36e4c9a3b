"""Training: resume, evaluate, then collect, update and publish in each step, and evaluate again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import PolicyVersion, Purpose
from kestrl.errors import Boundary, KestrlError, PlaceError, StorageError, UserInputError
from kestrl.runstate.events import (
    CheckpointConfirmed,
    Compared,
    LearningObserved,
    MismatchMeasured,
    PhaseEntered,
    StepFinished,
    StorageRefused,
)
from kestrl.runstate.history import LastStep, Mismatch
from kestrl.runstate.state import WINDOW_STEPS
from kestrl.runstate.states import RunPhase
from kestrl.storage import layout
from kestrl.storage.episodes import EpisodeBatch, StoredGroup
from kestrl_learner.batch.rows import train_batch
from kestrl_learner.concurrency import Interrupted, guarded
from kestrl_learner.dispatch.group_queue import ReadyGroup
from kestrl_learner.dispatch.group_source import MakeSource
from kestrl_learner.ledger import Ledger, LedgerError, Superseded
from kestrl_learner.progress.learning import learning_in, step_counts
from kestrl_learner.run_resources import RunResources
from kestrl_learner.store import checkpoint
from kestrl_learner.store.records import step_record
from kestrl_learner.store.retention import delete_adapters, delete_episodes
from kestrl_learner.train.compute import Compute
from kestrl_learner.train.diagnostics import staleness_facts, trace_advantages
from kestrl_learner.train.trainer import StepResult

log = logging.getLogger(__name__)
PACE_STEPS = 10
"""Steps whose mean duration gives the estimated time to completion."""


class MismatchExceeded(KestrlError):
    """The log-prob mismatch between learner and engines crosses a bound: the rollouts are not from this policy."""

    boundary = Boundary.ENGINE
    code = "logprob_gap"


def refuse_if_superseded(ledger: Ledger) -> None:
    """Fences the run's storage.

    Writes go on if the database does not answer: the next resume skips what a replaced learner wrote.

    Raises:
        Superseded: Another learner owns the run.
    """
    try:
        ledger.check_owner()
    except Superseded:
        raise
    except KestrlError as error:
        log.warning("cannot check whether this learner still owns the run: %s", error)


class TrainingRun:
    """The training of one run. Create it in the running event loop, call `run` once and `close` at the end."""

    def __init__(self, resources: RunResources, compute: Compute, make_source: MakeSource) -> None:
        self._resources, self._settings, self._compute = resources, resources.settings, compute
        self._trainer = compute.trainer(resources.steps)
        self._ledger = Ledger(
            self._settings.database,
            seed=self._settings.seed,
            size=len(resources.scenarios),
            epochs=self._settings.epochs,
            run=self._settings.run,
        )
        # Not a method of this object: that cycle would keep the model in memory until the next garbage collection.
        resources.store.fence.follow(partial(refuse_if_superseded, self._ledger))
        self._source = make_source(self._ledger, self._trainer.algorithm)
        self._pace: list[float] = []
        self._done = 0
        """Steps recorded in the ledger."""
        self._weights = 0
        """Steps applied to the weights."""
        self._saved: int | None = None
        """Step of the newest confirmed checkpoint."""
        self._longest_update = 0.0

    @property
    def owner(self) -> int:
        """Fencing token of this learner."""
        return self._ledger.token

    def drain(self) -> None:
        """Starts no further group."""
        self._source.drain()

    async def run(self) -> None:
        """Trains from the newest checkpoint to the end.

        Raises:
            Interrupted: The run drained; a checkpoint holds all steps.
            KestrlError: The run failed; a checkpoint holds all steps.
        """
        try:
            self._done = self._weights = await asyncio.to_thread(self._resume)
            policy = await self._before()
            await self._between(policy)
            await self._after()
        except UserInputError:
            raise
        except Exception as cause:  # whatever ends a run, its steps are checkpointed
            await self._checkpoint_on_failure(cause)
            raise

    def close(self) -> None:
        """Closes the ledger, after the last write: the store asks it who owns the run."""
        self._ledger.close()

    def _resume(self) -> int:
        """Resumes from the newest checkpoint; returns the number of steps done."""
        resources = self._resources
        newest_checkpoint = checkpoint.newest(resources.store, outdated=self._outdated)
        if newest_checkpoint is None:
            self._refuse_foreign_storage()
            self._ledger.rewind(0)
            resources.restart()
            return 0
        digest = newest_checkpoint.record.digest
        if digest is not None and not resources.continues(digest):
            raise UserInputError(
                f"run {self._settings.run} was trained with another model, algorithm "
                f"or data than the manifest specifies now; start a new run or restore what was changed"
            )
        self._trainer.restore(newest_checkpoint.state)
        resources.restore(newest_checkpoint.step, newest_checkpoint.record)
        pending = self._rewind(newest_checkpoint.step)
        self._saved = newest_checkpoint.step
        log.info("resumed at step %d; %d scenarios are pending again", newest_checkpoint.step, pending)
        return newest_checkpoint.step

    def _outdated(self, manifest: checkpoint.Manifest) -> bool:
        """Whether the ledger says that a later owner resumed from before this checkpoint."""
        return self._ledger.outdated(manifest.step, manifest.record.owner)

    def _refuse_foreign_storage(self) -> None:
        """Refuses empty storage if the ledger has steps.

        Raises:
            UserInputError: The storage is not the run's, and training would silently begin anew.
        """
        store, step = self._resources.store, self._ledger.frontier()
        if step and not store.list(layout.ADAPTERS):
            raise UserInputError(
                f"the ledger holds a run at step {step}, but {store.uri} holds nothing of it; restore the storage, or "
                f"start another run with another metadata.name"
            )

    def _rewind(self, step: int) -> int:
        try:
            return self._ledger.rewind(step)
        except LedgerError as error:
            if error.code != "ledger_behind":
                raise
            raise UserInputError(
                f"{self._resources.store.uri} holds a run at step {step}, and its ledger "
                f"is not here ({error}): what it trained on "
                f"would be trained on again; restore the ledger, or start another "
                f"run with another storage.uri or metadata.name"
            ) from error

    async def _before(self) -> PolicyVersion:
        resources = self._resources
        policy = await self._publish(None)
        if resources.progress.state.history.before is None and resources.validation:
            before = await resources.evaluate(policy, sampled=True, when="before")
            resources.progress.emit(Compared(when="before", means=before))
            await self._save()
        await self._evaluate_between(policy)
        return policy

    async def _between(self, policy: PolicyVersion) -> None:
        resources, source = self._resources, self._source
        resources.progress.begin_gathering(self._settings.algorithm.groups_per_step)
        resources.progress.idle.lap()  # what came before the first step belongs to none
        source.begin(policy, self._done)
        resources.progress.emit(PhaseEntered(phase=RunPhase.TRAINING, message=""))
        running = asyncio.create_task(source.run(), name="group-source")
        try:
            await guarded(self._steps(policy), running)
        finally:
            running.cancel()
            await asyncio.wait([running])
            await self._store_rest()
        if self._saved != self._done:  # the scenarios ran out between two checkpoints
            await self._save()

    async def _after(self) -> None:
        resources = self._resources
        version = resources.progress.state.policy.version
        assert version is not None, "version 0 is published before anything asks for one"
        after = await resources.evaluate(version, sampled=True, when="after")
        resources.progress.emit(Compared(when="after", means=after))
        self._ledger.drop_remaining()

    async def _evaluate_between(self, policy: PolicyVersion) -> None:
        """Evaluates every `evalEvery` steps, and after a resume if this step's evaluation is missing."""
        resources, every, step = self._resources, self._settings.eval_every, self._done
        if (
            not every
            or not step
            or step % every
            or step >= resources.steps
            or step in resources.progress.state.history.evaluations
        ):
            return
        await resources.evaluate(policy, sampled=False, when=f"step {step}")
        resources.progress.emit(PhaseEntered(phase=RunPhase.TRAINING))

    async def _checkpoint_on_failure(self, cause: Exception) -> None:
        """Writes a checkpoint if weights and ledger agree. The cause is raised even if this fails."""
        if self._weights != self._done or isinstance(cause, Superseded):
            return
        try:
            await asyncio.to_thread(self._checkpoint)
        except KestrlError as error:
            if isinstance(cause, Interrupted):
                raise
            log.error("step %d cannot be checkpointed: %s", self._done, error)

    async def _steps(self, policy: PolicyVersion) -> None:
        settings, resources = self._settings, self._resources
        while self._done < resources.steps:
            began = time.monotonic()
            with span(SpanName.STEP, {Attr.STEP: self._done + 1, Attr.POLICY: policy.name}):
                with resources.progress.idle.waiting("groups"):
                    ready = await self._source.take(self._done)
                if resources.drain.is_set() and not ready:
                    raise Interrupted
                if not ready:
                    break
                await self._save_before_update()
                policy = await self._step(ready, policy, began)
            await self._evaluate_between(policy)
            if self._done % settings.checkpoint_every == 0 or self._done == resources.steps:
                await self._save()
            self._source.advance(policy)
            await self._retire(policy)
            await asyncio.to_thread(
                self._apply_retention, self._source.versions_in_use() | resources.engines.wanted() | {policy.name}
            )

    async def _step(self, ready: Sequence[ReadyGroup], policy: PolicyVersion, began: float) -> PolicyVersion:
        """Updates the policy by groups that were collected since `began`; returns the next version."""
        async with AsyncExitStack() as turn:
            collected = time.monotonic()
            if self._settings.turns:
                await turn.enter_async_context(self._resources.turn(self._compute))
            result = await self._update(ready, policy)
            trained = time.monotonic()
            self._longest_update = max(self._longest_update, trained - collected)
            # The ledger first: from here on weights and ledger agree, and a checkpoint can be written at any time.
            self._ledger.train([item.lease for item in ready], self._done + 1)
            self._done += 1
            await self._record(ready, result, began, collected, trained)
            return await self._publish(policy.name, turn)

    async def _publish(self, parent: str | None, turn: AsyncExitStack | None = None) -> PolicyVersion:
        resources = self._resources
        policy = await resources.publish(self._compute, self._done, parent, turn)
        learning = learning_in(resources.progress.state, self._settings)
        is_settled = learning.learned is False and self._done >= min(WINDOW_STEPS, resources.steps)
        if learning.learned or is_settled:
            if not learning.learned:
                log.warning("nothing is learned: %s", learning.message)
            elif learning.warning:
                log.warning("%s", learning.warning)
            resources.progress.emit(LearningObserved(learning=learning))
        self._trainer.published(policy.name)
        return policy

    async def _update(self, ready: Sequence[ReadyGroup], policy: PolicyVersion) -> StepResult:
        groups = train_batch([item.group for item in ready], self._trainer.algorithm, policy.name)
        with span(SpanName.UPDATE, {Attr.STEP: self._done + 1}):
            result = await self._resources.computed(self._trainer.step, groups, self._done)
        self._weights = self._done + 1
        mismatch, resources = result.mismatch, self._resources
        resources.progress.emit(MismatchMeasured(gap=Mismatch(**asdict(mismatch.own))))
        alarms = mismatch.alarms(self._settings.gap_bounds)
        if alarms:
            raise MismatchExceeded(
                f"step {self._done + 1}: log-probs of learner and engine differ, in nats per token: "
                f"{'; '.join(alarms)}. Samples of such an engine are not from the policy it reports"
            )
        return result

    async def _record(
        self, ready: Sequence[ReadyGroup], result: StepResult, began: float, collected: float, trained: float
    ) -> None:
        """Stores episodes and metrics of a step and publishes its progress."""
        resources, step = self._resources, self._done
        groups = [item.group for item in ready]
        stored = [item.stored(tokens) for item, tokens in zip(ready, result.tokens, strict=True)]
        trace_advantages(step, stored)
        await self._store(step, [*stored, *self._source.take_ended()])
        now = time.monotonic()
        self._pace = [*self._pace, now - began][-PACE_STEPS:]
        state, idle = resources.progress.state, resources.progress.idle.lap()
        ages = [item.ages(step - 1) for item in ready]
        facts = step_record(step, groups, result) | {
            "staleness": max(max(tokens) for tokens in ages),
            "seconds": {"collect": collected - began, "update": trained - collected, "rest": now - trained},
            "idle": idle.facts(),
            "stale": state.stale_in_step.facts(),
            "gathered": state.gathering.facts(),
            **staleness_facts(ages, groups, state.stale_in_step.seconds),
        }
        resources.progress.record_work()
        resources.sinks.step(step, facts)
        log.info("step %d: %s", step, facts)
        resources.progress.begin_gathering(self._settings.algorithm.groups_per_step)
        took = LastStep(
            tokens_per_second=result.sampled / (now - began),
            episodes_per_second=sum(len(group.episodes) for group in groups) / (now - began),
            eta_seconds=sum(self._pace) / len(self._pace) * (resources.steps - step),
            idle=idle,
        )
        message = f"rollouts {collected - began:.1f} s, update {trained - collected:.1f} s"
        counts = step_counts(groups, result)
        resources.progress.emit(StepFinished(step=step, counts=counts, took=took, message=message))

    async def _store(self, step: int, stored: Sequence[StoredGroup]) -> None:
        batch = EpisodeBatch(purpose=Purpose.TRAIN, step=step, stored=stored)
        await asyncio.to_thread(self._resources.episodes.append, batch)

    async def _store_rest(self) -> None:
        """Stores the groups that ended after the last step, in the file of the next step: a resume writes it anew."""
        ended_groups = self._source.take_ended()
        try:
            if ended_groups:
                await self._store(self._done + 1, ended_groups)
        except (StorageError, PlaceError) as error:
            log.error("the episodes of %d groups that no step took are not stored: %s", len(ended_groups), error)

    async def _retire(self, policy: PolicyVersion) -> None:
        names_in_use = self._source.versions_in_use() | {policy.name}
        engines = self._resources.engines
        await engines.retire(engines.wanted() - names_in_use, accepted_from=self._source.accepted_from())

    def _apply_retention(self, names: Collection[str]) -> None:
        settings, store = self._settings, self._resources.store
        if settings.keep_adapters:
            delete_adapters(store, keep=settings.keep_adapters, names=names, steps=checkpoint.steps(store))
        if settings.keep_episodes:
            delete_episodes(self._resources.episodes, keep=settings.keep_episodes)

    async def _save(self) -> None:
        """Writes a checkpoint. One that cannot be read back is logged and does not end the run: earlier ones are
        kept.
        """
        try:
            await asyncio.to_thread(self._checkpoint)
        except checkpoint.Unconfirmed as error:
            log.error("%s", error)

    async def _save_before_update(self) -> None:
        """Writes a checkpoint if the next update may be cut short: the run drains, or another update took longer than a
        stop waits. An update cannot be interrupted.
        """
        may_be_cut = self._resources.drain.is_set() or self._longest_update > self._settings.grace_seconds
        if may_be_cut and self._done and self._saved != self._done:
            await self._save()

    def _checkpoint(self) -> None:
        resources = self._resources
        with span(SpanName.CHECKPOINT, {Attr.STEP: self._done}):
            new_checkpoint = checkpoint.Checkpoint(
                self._done, self._trainer.state(), resources.snapshot(self._ledger.token)
            )
            try:
                checkpoint.write(resources.store, new_checkpoint, keep=self._settings.keep_checkpoints)
            except checkpoint.Unconfirmed as error:
                resources.progress.emit_soon(StorageRefused(reason=str(error)))
                raise
            self._saved = new_checkpoint.step
            resources.progress.emit_soon(CheckpointConfirmed(step=new_checkpoint.step))
