"""Resources of a run: data, storage, engines and workers, and the operations that training and evaluation share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.data import load_scenarios
from kestrl.episode import PolicyVersion, Scenario
from kestrl.errors import PlaceError, StorageError, UserInputError
from kestrl.metric_sinks import RunStart
from kestrl.runstate.states import RunPhase
from kestrl.storage import Probe
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl.storage.summary import write_summary
from kestrl_learner.concurrency import unless
from kestrl_learner.dispatch.evaluate import evaluate
from kestrl_learner.dispatch.pinned_tools import PinnedTools
from kestrl_learner.dispatch.workers import Workers
from kestrl_learner.engines.engines import Engines
from kestrl_learner.ledger import Superseded
from kestrl_learner.ledger.schedule import total_steps
from kestrl_learner.model import adapters
from kestrl_learner.model.adapters import AdapterSource
from kestrl_learner.progress.learning import Learning, learning
from kestrl_learner.progress.progress import Progress
from kestrl_learner.store.metric_sinks import MetricSinks, make_sinks
from kestrl_learner.store.records import build_summary, format_means, identity_digest
from kestrl_learner.store.run_record import RunRecord
from kestrl_learner.store.runstore import RunStore

log = logging.getLogger(__name__)


class RunResources:
    """Data, storage, engines, workers, progress and record of one run."""

    def __init__(self, settings: LearnerSettings, progress: Progress, drain: asyncio.Event, store: RunStore) -> None:
        """Reads the data.

        Raises:
            UserInputError: Data and schedule do not give a single step.
        """
        self.settings, self.progress, self.drain, self.store = settings, progress, drain, store
        self.episodes = ObjectEpisodeStore(store)
        self.scenarios = load_scenarios(Path(settings.data.path), size=settings.data.size)
        self.validation: Sequence[Scenario] = (
            load_scenarios(Path(settings.validation.path), size=settings.validation.size) if settings.validation else ()
        )
        self.steps = total_steps(
            len(self.scenarios), settings.epochs, settings.algorithm.groups_per_step, settings.max_steps
        )
        if settings.evaluate is not None and not self.validation:
            raise UserInputError(
                "data.validation: is missing, so there is nothing to evaluate on; add it to the manifest"
            )
        if self.steps == 0:
            raise UserInputError(
                f"data.train: {len(self.scenarios)} scenarios x {settings.epochs} epochs do not fill one step of "
                f"{settings.algorithm.groups_per_step} groups; lower algorithm.groupsPerStep"
            )
        self.sinks = MetricSinks(make_sinks(store, settings.sinks), progress.count_failure_soon)
        self.record = RunRecord(digest=identity_digest(settings, self.scenarios))
        """As of the last checkpoint or change; `snapshot` brings it up to date."""
        self.newest: tuple[PolicyVersion, str] | None = None
        """The newest published version and its address."""
        self._probe: Probe | None = None
        """Probe of the newest published version."""
        self._began = time.monotonic()

    def connect(self) -> None:
        """Opens the channels and starts the metric sinks; call it in the event loop that uses them."""
        self.workers = Workers(self.settings, self.progress)
        self.pinned_tools = PinnedTools(self.store)
        self.workers.verify_tools = self.pinned_tools.verify
        self.engines = Engines(self.settings.engines, self.progress, self.settings.start_seconds)
        self.progress.update(engines=self.engines.reports())
        settings = self.settings
        self.sinks.start(RunStart(job=settings.job, run=settings.run, storage=self.store.uri, total_steps=self.steps))

    async def close(self) -> None:
        """Closes the channels."""
        await self.workers.close()
        await self.engines.close()

    def seconds(self) -> float:
        """Time spent on the run so far by all its processes."""
        return self.record.seconds + time.monotonic() - self._began

    async def publish(self, model: AdapterSource, step: int, parent: str | None) -> PolicyVersion:
        """Stores the adapter as a version and waits until engines have verified it.

        Raises:
            Interrupted: The run is draining.
            NoEngineProved: No engine verified it.
        """
        settings = self.settings
        with span(SpanName.PUBLISH, {Attr.STEP: step}):
            began = time.monotonic()
            manifest, uri = await asyncio.to_thread(
                lambda: adapters.publish(
                    self.store, model, job=settings.job, step=step, base=settings.model, parent=parent
                )
            )
            self.progress.probe_distance = None if self._probe is None else manifest.probe.apart(self._probe)
            self._probe = manifest.probe
            await unless(self.drain, self.engines.publish(manifest.policy, uri, parent=manifest.parent))
            self.progress.publish_seconds = time.monotonic() - began
        self.newest = manifest.policy, uri
        return manifest.policy

    def snapshot(self, owner: int) -> RunRecord:
        """The record at this moment, for a checkpoint of the learner with this fencing token."""
        progress = self.progress
        return self.record.but(
            owner=owner,
            seconds=self.seconds(),
            failures=dict(progress.failures),
            skipped=tuple(sorted(progress.skipped)),
            stale=progress.stale.copy(),
            tools=progress.tools.total,
        )

    def restore(self, record: RunRecord) -> None:
        """Continues the record of a checkpoint."""
        self.record = record.but(digest=self.record.digest)
        self.progress.failures.update(record.failures)
        self.progress.skipped |= set(record.skipped)
        self.progress.stale = record.stale.copy()
        self.progress.tools.total = record.tools

    def learning(self) -> Learning | None:
        """Whether the run has learned anything; None before its first step."""
        settings, newest = self.settings, self.newest
        if newest is None or settings.evaluate is not None:
            return None
        return learning(
            self.record.learning,
            newest[0].sha256,
            tools=settings.tools,
            learning_rate=settings.algorithm.learning_rate,
        )

    async def evaluate(self, policy: PolicyVersion, *, sampled: bool, when: str) -> dict[str, float] | None:
        """Means over the held-out scenarios, if there are any; stored under `metrics/eval/` and in the summary.

        Args:
            policy: The evaluated version.
            sampled: Whether one more episode of each scenario is run at the temperature of training.
            when: The moment, for messages.

        Raises:
            Interrupted: The run is draining.
        """
        if not self.validation:
            return None
        settings = self.settings
        work = evaluate(
            self.validation,
            run=settings.run,
            policy=policy,
            sampling=settings.evaluation,
            trained=settings.temperature if sampled else None,
            seed=settings.seed,
            workers=self.workers,
            engines=self.engines,
            progress=self.progress,
            episodes=self.episodes,
        )
        return await self._evaluated(policy, work, when)

    async def evaluate_once(self, policy: PolicyVersion) -> dict[str, float]:
        """The evaluation of a run that does not train; a greedy one has the means at the temperature of training, too.

        Raises:
            Interrupted: The run is draining.
        """
        sampling = self.settings.evaluation
        when = policy.name if sampling.greedy else f"{policy.name}, {sampling}"
        found = await self.evaluate(policy, sampled=sampling.greedy, when=when)
        assert found is not None, "the data were checked at the start"
        return found

    async def _evaluated(
        self, policy: PolicyVersion, work: Coroutine[Any, Any, dict[str, float]], when: str
    ) -> dict[str, float]:
        self.progress.update(phase=RunPhase.EVALUATING, message=f"{len(self.validation)} held-out scenarios, {when}")
        means = await unless(self.drain, work)
        self.record = self.record.with_evaluation(policy.step, means)
        self.sinks.evaluation(policy.step, means)
        self.progress.update(message=f"held-out, {when}: {format_means(means)}")
        log.info("held-out at step %d: %s", policy.step, means)
        return means

    async def write_summary(self, status: RunPhase, *, reason: str = "") -> None:
        """Writes `summary.json` and ends the metric sinks with it.

        If it cannot be written, the error is raised unless the run has failed itself.
        """
        summary = build_summary(
            self.record,
            status=status,
            reason=reason,
            steps=self.progress.step,
            total_steps=self.steps,
            newest=self.newest,
            seconds=self.seconds(),
            failures=self.progress.failures,
            skipped=len(self.progress.skipped),
            gap_bound=self.settings.gap_bounds.mean,
            learning=self.learning(),
            stale=self.progress.stale,
            tools=self.progress.tools.total,
            tool_warning=self.progress.tool_warning,
            sandboxes=self.progress.sandboxes,
            evaluation=self.settings.evaluation if self.validation else None,
        )
        try:
            await asyncio.to_thread(write_summary, self.store, summary)
        except Superseded:
            log.warning("the summary is not written: another learner owns the run")
        except (StorageError, PlaceError) as error:
            log.error("the summary cannot be written: %s", error)
            if status is not RunPhase.FAILED:
                raise
        await asyncio.to_thread(self.sinks.finish, summary)
