"""The source of groups that are rolled out: dispatches them to workers as staleness, capacity and scenarios allow, and
serves those that are complete to steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.algorithms import Algorithm
from kestrl.episode import PolicyVersion, Purpose, Scenario
from kestrl.errors import KestrlError
from kestrl.storage.episodes import StoredGroup
from kestrl_learner.dispatch.group_assignment import GroupAssignment
from kestrl_learner.dispatch.group_outcomes import GroupOutcomes
from kestrl_learner.dispatch.group_queue import GroupQueue, ReadyGroup
from kestrl_learner.dispatch.group_source import GroupSource
from kestrl_learner.dispatch.leases import ScenarioLeases
from kestrl_learner.dispatch.running_groups import RunningGroup, RunningGroups
from kestrl_learner.dispatch.workers import Workers
from kestrl_learner.engines.admission import EpisodeLimit
from kestrl_learner.engines.engines import Engines
from kestrl_learner.ledger import Lease, Ledger
from kestrl_learner.ledger.schedule import admissible, affordable, group_seed
from kestrl_learner.progress.progress import Progress

log = logging.getLogger(__name__)


class StepDeadline(KestrlError):
    """A step's groups were not complete within `deadlines.step`."""

    code = "step_deadline"
    retryable = True


class Dispatcher(GroupSource):
    """Starts groups for training and collects them for steps."""

    def __init__(
        self,
        settings: LearnerSettings,
        scenarios: Sequence[Scenario],
        ledger: Ledger,
        workers: Workers,
        engines: Engines,
        progress: Progress,
        vocabulary: int,
        algorithm: Algorithm,
        *,
        steps: int,
    ) -> None:
        self._settings, self._scenarios = settings, scenarios
        self._per_step, self._max_staleness = settings.algorithm.groups_per_step, settings.algorithm.max_staleness
        self._groups = steps * self._per_step
        self._workers, self._engines, self._progress = workers, engines, progress
        self._leases = ScenarioLeases(ledger)
        self._queue = GroupQueue(at_most=(self._max_staleness + 1) * self._per_step)
        self._running = RunningGroups()
        self._consumed = 0
        self._wake = asyncio.Event()
        self._outcomes = GroupOutcomes(
            settings,
            self._leases,
            self._queue,
            engines,
            progress,
            vocabulary,
            algorithm,
            scenarios,
            resume=self._wake.set,
        )
        self._admission = EpisodeLimit(settings.algorithm.group_size)
        self._lowest: int | None = None
        observe(Metric.ADMISSION, lambda: self._admission.limit or self._workers.capacity)
        self._policy: PolicyVersion | None = None
        self._recent = deque[PolicyVersion](maxlen=self._max_staleness + 1)
        """The newest versions that turns may be sampled from, if groups continue over updates."""
        self._draining = False

    def begin(self, policy: PolicyVersion, step: int) -> None:
        self._policy, self._consumed = policy, step * self._per_step
        self._recent.append(policy)
        self._engines.changes.add(self._wake.set)
        self._workers.changes.add(self._wake.set)
        self._engines.looks.add(self._update_admission)
        self._wake.set()

    def advance(self, policy: PolicyVersion) -> None:
        """Uses a newer version for new groups, and cancels running ones that are now too old to be trained on unless
        groups continue over updates.

        Left running, they would be released when they end, and hold an adapter slot until then.
        """
        self._policy = policy
        self._recent.append(policy)
        if not self._settings.algorithm.continues:
            self._running.end_older(policy.step - self._max_staleness)
        self._wake.set()

    def take_ended(self) -> list[StoredGroup]:
        return self._outcomes.take_ended()

    def drain(self) -> None:
        self._draining = True
        self._queue.notify()

    def versions_in_use(self) -> set[str]:
        if self._settings.algorithm.continues:
            return {policy.name for policy in self._recent}
        return self._running.versions_in_use()

    def accepted_from(self) -> int:
        assert self._policy is not None
        return min(self._running.versions(), default=self._policy.step)

    def _update_admission(self) -> None:
        """Adapts the admission limit after an engine reported its load."""
        before = self._admission.limit
        self._admission.update(self._engines.loads(), running=self._running.episodes(), ceiling=self._workers.capacity)
        now = self._admission.limit
        if now == before:
            return
        if now is not None and (self._lowest is None or now < self._lowest):
            # Logged only when it is the lowest so far: the limit changes throughout the run.
            log.info("the engines' load allows %d concurrent episodes", now)
            self._lowest = now
        self._wake.set()

    async def run(self) -> None:
        """Starts groups as staleness, capacity and scenarios allow, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._start_groups(tasks)
                    await self._wake.wait()
                    self._wake.clear()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        policy = self._policy
        if policy is None or self._draining or self._leases.exhausted or self._outcomes.pause.active:
            return
        if not self._engines.proved(policy):
            return
        for _ in range(self._startable(policy)):
            lease = self._leases.next(policy.step)
            if lease is None:
                self._queue.notify()
                return
            size, now = self._settings.algorithm.group_size, asyncio.get_running_loop().time()
            task = tasks.create_task(self._run(lease, policy), name=f"group-{lease.position}")
            self._running.add(task, RunningGroup(lease.position, policy, size, now))
            task.add_done_callback(self._ended)
            self._progress.observe(groups_running=len(self._running))

    def _startable(self, policy: PolicyVersion) -> int:
        """Groups that may start now."""
        outstanding = self._running.wanted() + len(self._queue)
        count = admissible(
            version=policy.step,
            max_staleness=self._max_staleness,
            groups_per_step=self._per_step,
            consumed=self._consumed,
            outstanding=outstanding,
        )
        count = min(count, self._groups - self._consumed - outstanding)
        count = min(count, self._workers.room(self._settings.algorithm.group_size))
        allowed = self._admission.groups(self._running.episodes())
        return count if allowed is None else min(count, allowed)

    def _episodes_ended(self, task: asyncio.Task[None], count: int) -> None:
        self._running[task].episodes -= count
        self._wake.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.remove(task)
        self._progress.observe(groups_running=len(self._running))
        self._queue.notify()
        self._wake.set()

    async def _run(self, lease: Lease, policy: PolicyVersion) -> None:
        settings, running, task = self._settings, self._running, asyncio.current_task()
        assert task is not None
        request = GroupAssignment(
            group_id=lease.group_id(settings.run),
            scenario=self._scenarios[lease.ordinal],
            size=settings.algorithm.group_size,
            policy=policy,
            temperature=settings.temperature,
            seed=group_seed(settings.seed, lease.epoch, lease.ordinal),
            purpose=Purpose.TRAIN,
            max_turn_age=self._max_staleness if settings.algorithm.continues else 0,
        )
        running[task].begun = True
        began = asyncio.get_running_loop().time()
        try:
            if running.is_late(task) or running.is_outdated(task):
                raise asyncio.CancelledError
            group = await self._workers.run(request, lambda count: self._episodes_ended(task, count))
        except asyncio.CancelledError:
            # Only `advance` and a step's deadline cancel the task, and there is no await below this point.
            if running.is_late(task):
                late = StepDeadline(f"not complete within the step's deadline of {settings.deadlines.step:g} s")
                self._outcomes.failed(lease, late)
            elif running.is_outdated(task):
                self._release_outdated(lease, policy, running[task])
            else:
                raise
        except KestrlError as error:
            self._outcomes.failed(lease, error)
        else:
            proved = self._engines.proofs.since(policy, began, newer=settings.algorithm.continues)
            self._outcomes.ended(lease, request, policy, group, proved=proved)

    def _release_outdated(self, lease: Lease, policy: PolicyVersion, running: RunningGroup) -> None:
        assert self._policy is not None
        seconds = asyncio.get_running_loop().time() - running.at
        self._outcomes.outdated(lease, policy, age=self._policy.step - policy.step, seconds=seconds)

    async def take(self, step: int) -> list[ReadyGroup]:
        """The groups of a step, ordered by policy version, then by position.

        Fewer than groups_per_step when the scenarios have run out or at the step's deadline, at which missing groups
        are cancelled and retried; none while draining. Groups that are too stale are released on the way, each exactly
        once.

        Raises:
            StepDeadline: No group was complete by the deadline.
        """
        seconds = self._settings.deadlines.step
        try:
            async with asyncio.timeout(seconds):
                await self._queue.wait_for(lambda: self._step_complete(step) or self._draining)
            if not self._step_complete(step):
                return []
        except TimeoutError:
            await self._cancel_late()
            self._evict(step)
            if not len(self._queue):
                raise StepDeadline(
                    f"no group of step {step + 1} was complete within {seconds:g} s; check what the episodes wait for, "
                    "or raise spec.rollout.deadlines.step"
                ) from None
        groups = self._outcomes.taken(self._queue.take(self._per_step), step)
        self._consumed += self._per_step
        self._wake.set()
        return groups

    def _step_complete(self, step: int) -> bool:
        """Whether a step has all groups it can get, and need not wait for a running group that it would make too
        old.
        """
        self._evict(step)
        if self._leases.exhausted and not len(self._running):
            return True
        return len(self._queue) >= self._per_step and not self._must_wait(step)

    def _must_wait(self, step: int) -> bool:
        """Whether the step must wait for running groups that would otherwise be too old for every later step."""
        if self._settings.algorithm.stale_groups != "wait":
            return False
        return not affordable(
            step=step,
            max_staleness=self._max_staleness,
            groups_per_step=self._per_step,
            ready=self._queue.versions(),
            running=self._running.versions(),
        )

    async def _cancel_late(self) -> None:
        """Cancels the groups that a step still waits for, the first dispatched first; the others belong to the next
        step.
        """
        late = self._running.first(self._per_step - len(self._queue))
        self._running.end_late(late)
        if late:
            log.warning(
                "the step's deadline passed: %d of %d groups are complete, the others are cancelled and retried",
                len(self._queue),
                self._per_step,
            )
            await asyncio.wait(late)

    def _evict(self, step: int) -> None:
        if self._outcomes.evict(step):
            self._wake.set()
