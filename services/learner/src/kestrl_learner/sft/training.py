"""The loop of supervised fine-tuning: step, evaluate, checkpoint; at the end the adapter or the model is published."""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from kestrl._shared.plan.sft import SFTSettings
from kestrl.errors import UserInputError
from kestrl.metric_sinks import RunStart
from kestrl.runstate.states import RunPhase
from kestrl.storage.summary import SFTSummary, SummaryPolicy, write_summary
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.ledger.schedule import epoch_order
from kestrl_learner.model.adapters import AdapterSource
from kestrl_learner.model.full_model import FullModel
from kestrl_learner.sft.data import Item, load_items, load_tokenizer, shared_warning
from kestrl_learner.sft.policy import load_model, publish_policy, published_policy
from kestrl_learner.store import checkpoint
from kestrl_learner.store.metric_sinks import MetricSinks
from kestrl_learner.store.records import evaluations_of
from kestrl_learner.store.run_record import RunRecord
from kestrl_learner.store.runstore import Patience, RunStore
from kestrl_learner.store.storage_sink import StorageSink
from kestrl_learner.train.compute import TrainerSteps
from kestrl_learner.train.launcher import load_compute
from kestrl_learner.train.trainer import Trainer

log = logging.getLogger(__name__)
KEEP_CHECKPOINTS = 2
EVALUATED_AT_ONCE = 64
"""Conversations of one group in an evaluation."""


def batches(count: int, *, seed: int, epochs: int, size: int, max_steps: int | None) -> list[list[int]]:
    """The conversations of each step: every epoch in an order of its own, cut into batches; the last may be smaller."""
    order = [index for epoch in range(epochs) for index in epoch_order(seed, epoch, count)]
    return [order[start : start + size] for start in range(0, len(order), size)][:max_steps]


def as_group(items: Sequence[Item]) -> TrainGroup:
    """Conversations as one group, whose rows the model sorts by length and cuts by tokens."""
    rows = [replace(row, sequence=number) for number, item in enumerate(items) for row in item]
    return TrainGroup(id="sft", prompt=array("i"), rows=rows)


def identity_digest(settings: SFTSettings, items: Sequence[Item]) -> str:
    """Digest of what must not change when a run is resumed: model, optimiser and data, not the schedule's length."""
    fields = {
        "model", "dtype", "parameters", "rank", "alpha", "targets", "adapter_from", "seed", "max_tokens", "algorithm",
    }  # fmt: skip
    hashed = hashlib.sha256(settings.model_dump_json(include=fields, exclude_defaults=True).encode())
    for item in items:
        for row in item:
            hashed.update(row.token_ids.tobytes() + row.mask)
    return hashed.hexdigest()


def _unreported(_: str) -> None:
    """The store's own log line is the report of a wait, and the error that of a refusal."""


class SFTRun:
    """One run, of which rank 0 has everything but a share of the computation.

    Args:
        settings: Of the run.
        stopping: Whether to stop after the current step, with a checkpoint.
    """

    def __init__(self, settings: SFTSettings, stopping: Callable[[], bool] = lambda: False) -> None:
        self._settings, self._stopping = settings, stopping
        patience = Patience(settings.storage_seconds)
        self._store = RunStore(settings.storage, patience=patience, refused=_unreported, waiting=_unreported)
        self._train = load_items(settings, settings.train, "spec.data.train")
        self._validation = (
            [] if settings.validation is None else load_items(settings, settings.validation, "spec.data.validation")
        )
        if shared := shared_warning(settings, self._train, self._validation):
            log.warning("%s", shared)
        self._batches = batches(
            len(self._train),
            seed=settings.seed,
            epochs=settings.epochs,
            size=settings.algorithm.groups_per_step,
            max_steps=settings.max_steps,
        )
        self._sinks = MetricSinks({"storage": StorageSink(self._store)}, lambda _: None)
        self._record = RunRecord(digest=identity_digest(settings, self._train))
        self._tokenizer, _ = load_tokenizer(settings.model, settings.template)
        self._model: AdapterSource | FullModel
        self._trainer: TrainerSteps
        self._end_ranks: Callable[[], None] = lambda: None
        if settings.ranks == 1:
            model = self._model = load_model(settings)
            self._trainer = Trainer(model, settings.algorithm, settings.temperature, steps=len(self._batches))
        else:
            compute, self._end_ranks = load_compute(settings)
            self._model, self._trainer = compute.model, compute.trainer(len(self._batches))

    def run(self) -> SummaryPolicy | None:
        """Trains from the newest checkpoint to the end; returns what is published, None if it was stopped.

        Raises:
            UserInputError: The storage holds another run.
            KestrlError: The run failed; earlier checkpoints are kept.
        """
        try:
            return self._run()
        finally:
            self._end_ranks()

    def _run(self) -> SummaryPolicy | None:
        steps_done = self._resume()
        if steps_done == len(self._batches) and (policy := published_policy(self._store)) is not None:
            log.info("it has finished at step %d; another metadata.name begins a new run", steps_done)
            return policy
        settings = self._settings
        self._sinks.start(
            RunStart(job=settings.job, run=settings.job, storage=self._store.uri, total_steps=len(self._batches))
        )
        try:
            return self._train_from(steps_done)
        finally:
            self._sinks.finish(None)

    def _train_from(self, steps_done: int) -> SummaryPolicy | None:
        if not steps_done:
            self._evaluate(0)
        while steps_done < len(self._batches):
            if self._stopping():
                self._save(steps_done)
                return None
            self._step(steps_done)
            steps_done += 1
            last = steps_done == len(self._batches)
            if last or (self._settings.eval_every and steps_done % self._settings.eval_every == 0):
                self._evaluate(steps_done)
            if last or steps_done % self._settings.checkpoint_every == 0:
                self._save(steps_done)
        return self._publish(steps_done)

    def _resume(self) -> int:
        newest_checkpoint = checkpoint.newest(self._store)
        if newest_checkpoint is None:
            return 0
        if newest_checkpoint.record.digest != self._record.digest:
            raise UserInputError(
                f"{self._settings.storage} holds a run with another model, data or optimiser; give another "
                "metadata.name or storage.uri"
            )
        self._trainer.restore(newest_checkpoint.state)
        self._record = newest_checkpoint.record
        log.info("resumed at step %d of %d", newest_checkpoint.step, len(self._batches))
        return newest_checkpoint.step

    def _step(self, steps_done: int) -> None:
        began = time.monotonic()
        group = as_group([self._train[index] for index in self._batches[steps_done]])
        result = self._trainer.step([group], steps_done)
        seconds = time.monotonic() - began
        tokens = sum(len(row.token_ids) for row in group.rows)
        facts = {
            "step": steps_done + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.diagnostics["learning_rate"],
            "entropy": result.diagnostics["entropy"],
            "conversations": len(self._batches[steps_done]),
            "tokens": tokens,
            "learned_tokens": result.sampled,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
        self._sinks.step(steps_done + 1, facts)
        log.info(
            "step %d of %d: loss %.4f, %.0f tokens/s", steps_done + 1, len(self._batches), result.loss, tokens / seconds
        )

    def _evaluate(self, step: int) -> None:
        """Measures the mean loss of the validation data's learned tokens."""
        if not self._validation:
            return
        total, count = 0.0, 0
        for start in range(0, len(self._validation), EVALUATED_AT_ONCE):
            group = as_group(self._validation[start : start + EVALUATED_AT_ONCE])
            logprobs, tokens = self._trainer.logprob_sum([group])
            total -= logprobs
            count += tokens
        means = {"loss": total / count}
        self._record = self._record.with_evaluation(step, means)
        self._sinks.evaluation(step, means)
        log.info("step %d: validation loss %.4f", step, total / count)

    def _save(self, step: int) -> None:
        state = checkpoint.Checkpoint(step=step, state=self._trainer.state(), record=self._record)
        checkpoint.write(self._store, state, keep=KEEP_CHECKPOINTS)

    def _publish(self, step: int) -> SummaryPolicy:
        policy = publish_policy(self._store, self._model, self._tokenizer, self._settings, step)
        summary = SFTSummary(
            status=RunPhase.SUCCEEDED,
            steps=step,
            total_steps=len(self._batches),
            conversations=len(self._train),
            evaluations=evaluations_of(self._record),
            policy=policy,
        )
        write_summary(self._store, summary)
        self._sinks.finish(summary)
        return policy
