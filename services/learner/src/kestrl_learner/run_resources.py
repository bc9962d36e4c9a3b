"""Resources of a run: data, storage, engines and workers, and the operations that training and evaluation share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import PolicyVersion
from kestrl.errors import UserInputError
from kestrl.metric_sinks import RunStart
from kestrl.runstate.events import (
    ActivityNoted,
    Evaluated,
    HistoryRestored,
    PhaseEntered,
    VersionVerified,
)
from kestrl.runstate.states import RunPhase
from kestrl.storage import Probe
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl_learner.concurrency import finished, unless
from kestrl_learner.dispatch.evaluate import evaluate
from kestrl_learner.dispatch.pinned_tools import PinnedTools
from kestrl_learner.dispatch.workers import Workers
from kestrl_learner.engines.engines import Engines
from kestrl_learner.ledger.schedule import total_steps
from kestrl_learner.model import adapters
from kestrl_learner.progress.progress import Progress
from kestrl_learner.store.data_sets import read_data_sets
from kestrl_learner.store.metric_sinks import MetricSinks, make_sinks
from kestrl_learner.store.records import format_means, identity_digest, identity_digest_of_edition_2
from kestrl_learner.store.run_record import RunRecord
from kestrl_learner.store.runstore import RunStore

if TYPE_CHECKING:
    from kestrl_learner.train.compute import Compute

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RunResources:
    """Data, storage, engines, workers, progress and record of one run."""

    def __init__(self, settings: LearnerSettings, progress: Progress, drain: asyncio.Event, store: RunStore) -> None:
        """Reads the data.

        Raises:
            UserInputError: Data and schedule do not give a single step.
        """
        self.settings, self.progress, self.drain, self.store = settings, progress, drain, store
        self.episodes = ObjectEpisodeStore(store, settings.run)
        self.scenarios, self.validation, report = read_data_sets(settings)
        if report:
            progress.emit_soon(ActivityNoted(message=report))
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
        self.digest = identity_digest(settings, self.scenarios)
        self._earlier_seconds = 0.0
        """Time spent on the run by its earlier processes."""
        self._probe: Probe | None = None
        """Probe of the newest published version."""
        self._began = time.monotonic()

    def continues(self, digest: str) -> bool:
        """Whether the present settings and data are those of the run whose record has this digest."""
        if digest == self.digest:
            return True
        return digest == identity_digest_of_edition_2(self.settings, self.scenarios)

    def connect(self) -> None:
        """Opens the channels and starts the metric sinks; call it in the event loop that uses them."""
        self.engines = Engines.of_settings(self.settings, self.progress)
        self.pinned_tools = PinnedTools(self.store)
        self.workers = Workers(self.settings, self.progress, self.engines.serving, self.pinned_tools.verify)
        settings = self.settings
        self.sinks.start(RunStart(job=settings.job, run=settings.run, storage=self.store.uri, total_steps=self.steps))

    async def close(self) -> None:
        """Closes the channels."""
        await self.workers.close()
        await self.engines.close()

    def seconds(self) -> float:
        """Time spent on the run so far by all its processes."""
        return self._earlier_seconds + time.monotonic() - self._began

    async def computed(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs work of the model in a thread. In turns a cancellation waits for its end, as engines get the device."""
        return await (finished if self.settings.turns else asyncio.to_thread)(work, *arguments)

    @asynccontextmanager
    async def turn(self, compute: Compute) -> AsyncGenerator[None]:
        """The learner's turn on a device that engines use in turns with it; raises what `Engines.asleep` does."""
        async with self.engines.asleep(), compute.on_device():
            yield

    async def publish(
        self, compute: Compute, step: int, parent: str | None, turn: AsyncExitStack | None = None
    ) -> PolicyVersion:
        """Stores the adapter as a version and waits until engines have verified it.

        Args:
            compute: The adapter and what it changes.
            step: Steps that it was trained in.
            parent: Name of the version it was trained from.
            turn: What ends the learner's turn on the device, once the probe is computed. Without one, the probe has a
                turn of its own if the base is not on the device.

        Raises:
            Interrupted: The run is draining.
            NoEngineProved: No engine verified it.
        """
        settings = self.settings
        with span(SpanName.PUBLISH, {Attr.STEP: step}):
            began = time.monotonic()
            async with AsyncExitStack() if turn is None else turn as device:
                if turn is None and settings.base_offload:
                    await device.enter_async_context(self.turn(compute))
                manifest, uri = await self.computed(
                    lambda: adapters.publish(
                        self.store, compute.model, job=settings.job, step=step, base=settings.model, parent=parent
                    )
                )
            distance = None if self._probe is None else manifest.probe.apart(self._probe)
            self._probe = manifest.probe
            await self.serve(manifest.policy, uri, manifest.parent, began=began, probe_distance=distance)
        return manifest.policy

    async def serve(
        self, policy: PolicyVersion, uri: str, parent: str | None, *, began: float, probe_distance: float | None = None
    ) -> None:
        """Waits until engines have verified a stored version.

        Args:
            policy: The version.
            uri: Address of its folder.
            parent: Name of the version it was trained from.
            began: Begin of its publication, by the monotonic clock.
            probe_distance: Probe distance to the version before; None if it is not known.

        Raises:
            Interrupted: The run is draining.
            NoEngineProved: No engine verified it.
        """
        publishing = self.engines.publish(policy, uri, parent=parent, probe_distance=probe_distance)
        with self.progress.idle.waiting("policy"):
            await unless(self.drain, publishing)
        self.progress.emit(VersionVerified(seconds=time.monotonic() - began))

    def snapshot(self, owner: int) -> RunRecord:
        """The record at this moment, for a checkpoint of the learner with this fencing token."""
        return RunRecord.of(
            self.progress.state.history,
            digest=self.digest,
            owner=owner,
            seconds=self.seconds(),
            skipped=self.progress.skipped,
        )

    def restore(self, step: int, record: RunRecord) -> None:
        """Continues from a step with the record of its checkpoint. Callable from any thread."""
        self._earlier_seconds = record.seconds
        self.progress.skipped |= set(record.skipped)
        self.progress.emit_soon(HistoryRestored(step=step, history=record.history))

    def restart(self) -> None:
        """Begins at step 0. Callable from any thread."""
        self.restore(0, RunRecord())

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
        means = await self.evaluate(policy, sampled=sampling.greedy, when=when)
        assert means is not None, "the data were checked at the start"
        return means

    async def _evaluated(
        self, policy: PolicyVersion, work: Coroutine[Any, Any, dict[str, float]], when: str
    ) -> dict[str, float]:
        message = f"{len(self.validation)} held-out scenarios, {when}"
        self.progress.emit(PhaseEntered(phase=RunPhase.EVALUATING, message=message))
        with self.progress.idle.waiting("evaluation"):
            means = await unless(self.drain, work)
        self.progress.record_work()
        self.progress.emit(Evaluated(step=policy.step, means=means))
        self.sinks.evaluation(policy.step, means)
        self.progress.emit(ActivityNoted(message=f"held-out, {when}: {format_means(means)}"))
        log.info("held-out at step %d: %s", policy.step, means)
        return means
