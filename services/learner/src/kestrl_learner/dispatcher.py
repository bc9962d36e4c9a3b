"""Dispatches groups to rollout workers, decides what happens to finished ones, records it in the ledger, and serves
steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.algorithms import Algorithm
from kestrl.episode import Group, PolicyVersion, Purpose, Scenario
from kestrl.errors import Boundary, KestrlError
from kestrl.plan.settings import LearnerSettings
from kestrl.telemetry.metrics import observe
from kestrl.telemetry.names import Metric
from kestrl_learner.acceptance import LEFT_OUT, MAX_ATTEMPTS, GroupAction, decide
from kestrl_learner.admission import Admission
from kestrl_learner.dynamic_sampling import DynamicSampling
from kestrl_learner.engines import Engines
from kestrl_learner.failure_share import FailureShare
from kestrl_learner.ledger import Lease, Ledger
from kestrl_learner.progress import Progress
from kestrl_learner.retry_pause import RetryPause
from kestrl_learner.schedule import admissible, affordable, group_seed
from kestrl_learner.workers import GroupRequest, NoWorker, WorkerAway, Workers

log = logging.getLogger(__name__)
NOT_STARTED_CODES = frozenset({"draining", "drained", WorkerAway.code})
"""Failure codes of workers that left before the group began; they do not count as failures of the scenario."""


class StepDeadline(KestrlError):
    """A step's groups were not complete within `deadlines.step`."""

    code = "step_deadline"
    retryable = True


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group waiting for a training step."""

    lease: Lease
    group: Group
    policy: PolicyVersion


@dataclass(slots=True)
class _Running:
    """A running group."""

    position: int
    policy: PolicyVersion
    episodes: int
    """Episodes that have not ended."""
    at: float
    """Time of dispatch by the loop's clock."""
    begun: bool = False
    """Whether the task has started to run."""


class Dispatcher:
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
        self._settings, self._scenarios, self._ledger = settings, scenarios, ledger
        self._vocabulary = vocabulary
        self._groups = steps * settings.algorithm.groups_per_step
        self._workers, self._engines, self._progress = workers, engines, progress
        self._ready: list[ReadyGroup] = []
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._consumed = 0
        self._exhausted = False
        self._wake = asyncio.Event()
        self._outdated: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        """Tasks cancelled at their step's deadline."""
        self._pause = RetryPause()
        self._admission = Admission(settings.algorithm.group_size)
        self._lowest: int | None = None
        observe(Metric.ADMISSION, lambda: self._admission.limit or self._workers.capacity)
        per_step = settings.algorithm.groups_per_step
        self._failure_share = FailureShare(settings.max_failed_share, settings.algorithm)
        self._dynamic_sampling = DynamicSampling(algorithm, at_most=settings.algorithm.max_sampled_batches * per_step)
        self.policy: PolicyVersion | None = None
        self.draining = False

    def begin(self, policy: PolicyVersion, consumed: int) -> None:
        """Starts with a published version after `consumed` groups."""
        self.policy, self._consumed = policy, consumed
        self._wake.set()

    def advance(self, policy: PolicyVersion) -> None:
        """Uses a newer version for new groups and cancels running ones that are now too old to be trained on.

        Left running, they would be released when they end, and hold an adapter slot until then.
        """
        self.policy = policy
        for task, running in self._running.items():
            if policy.step - running.policy.step > self._settings.algorithm.max_staleness:
                self._outdated.add(task)
                self._end(task)
        self._wake.set()

    def update_admission(self) -> None:
        """Adapts the admission limit after an engine reported its load."""
        before = self._admission.limit
        self._admission.update(self._engines.loads(), running=self._episodes(), most=self._workers.capacity)
        now = self._admission.limit
        if now == before:
            return
        if now is not None and (self._lowest is None or now < self._lowest):
            # Logged only when it is the lowest so far: the limit changes throughout the run.
            log.info("the engines' load allows %d concurrent episodes", now)
            self._lowest = now
        self._wake.set()

    def _episodes(self) -> int:
        """Episodes running for training; only unfinished episodes of a group count."""
        return sum(running.episodes for running in self._running.values())

    def wake(self) -> None:
        """Checks again whether groups can start."""
        self._wake.set()

    def versions_in_use(self) -> set[str]:
        """Names of the versions that running groups use."""
        return {running.policy.name for task, running in self._running.items() if task not in self._outdated}

    async def feed(self) -> None:
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
        policy = self.policy
        if policy is None or self.draining or self._exhausted or self._pause.active:
            return
        engines = self._engines.proved(policy)
        if not engines:
            return
        algorithm = self._settings.algorithm
        outstanding = len(self._running) - len(self._outdated) + len(self._ready)
        count = admissible(
            version=policy.step,
            max_staleness=algorithm.max_staleness,
            groups_per_step=algorithm.groups_per_step,
            consumed=self._consumed,
            outstanding=outstanding,
        )
        count = min(count, self._groups - self._consumed - outstanding)
        count = min(count, self._workers.room(algorithm.group_size))
        allowed = self._admission.groups(self._episodes())
        for _ in range(count if allowed is None else min(count, allowed)):
            lease = self._ledger.lease(policy.step)
            if lease is None:
                self._exhausted = True
                self._progress.update()
                return
            task = tasks.create_task(self._run(lease, policy), name=f"group-{lease.position}")
            self._running[task] = _Running(
                lease.position, policy, algorithm.group_size, asyncio.get_running_loop().time()
            )
            task.add_done_callback(self._ended)
            self._progress.update(groups_running=len(self._running))

    def _episodes_ended(self, task: asyncio.Task[None], count: int) -> None:
        self._running[task].episodes -= count
        self._wake.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Cancels a group's task if it has begun. A task cancelled before it runs could not release its scenario:
        `_run` checks by itself.
        """
        if self._running[task].begun:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._outdated.discard(task)
        self._late.discard(task)
        self._progress.update(groups_running=len(self._running))
        self._wake.set()

    async def _run(self, lease: Lease, policy: PolicyVersion) -> None:
        settings, task = self._settings, asyncio.current_task()
        assert task is not None
        engines = self._engines.proved(policy)
        request = GroupRequest(
            group_id=lease.group_id(settings.run),
            scenario=self._scenarios[lease.ordinal],
            size=settings.algorithm.group_size,
            policy=policy,
            engines=engines,
            temperature=settings.temperature,
            seed=group_seed(settings.seed, lease.epoch, lease.ordinal),
            purpose=Purpose.TRAIN,
        )
        self._running[task].begun = True
        try:
            if task in self._late or task in self._outdated:
                raise asyncio.CancelledError
            group = await self._workers.run(request, lambda count: self._episodes_ended(task, count))
        except asyncio.CancelledError:
            # Only `advance` and a step's deadline cancel the task, and there is no await below this point.
            if task in self._late:
                self._group_failed(
                    lease, StepDeadline(f"not complete within the step's deadline of {settings.step_seconds:g} s")
                )
                return
            if task not in self._outdated:
                raise
            self._release_stale(lease, policy, self._running[task])
            return
        except KestrlError as error:
            self._group_failed(lease, error)
            return
        decision = decide(
            group,
            scenario=request.scenario,
            policy=policy,
            engines=[engine.name for engine in engines],
            algorithm=settings.algorithm,
            vocabulary=self._vocabulary,
            failures_before=lease.failures,
        )
        for failure in decision.failures:
            self._progress.count_rollout_failure(failure)
        if any(failure.boundary is Boundary.ENGINE and failure.retryable for failure in decision.failures):
            self._engines.suspect(engine.name for engine in engines)
        if decision.action is GroupAction.SKIP:
            self._progress.skip("train", lease.ordinal)
        elif decision.action is GroupAction.MASK:
            self._failure_share.add_unscored(decision.reason)
        elif decision.action is not GroupAction.RETRY:
            self._failure_share.add(len(group.episodes), decision.failures)
        if decision.action is GroupAction.TRAIN:
            self._pause.reset()
            self._progress.add(decision.group.episodes)
            if self._dynamic_sampling.accepts(decision.group):
                self._ledger.finish(lease)
                self._ready.append(ReadyGroup(lease, decision.group, policy))
                self._progress.groups_ready = len(self._ready)
            else:
                self._ledger.drop(lease, "dynamic sampling: the algorithm rejected the group's rewards")
        elif decision.action is GroupAction.RETRY:
            self._retry(lease, decision.reason)
        else:
            self._drop(lease, decision.reason, LEFT_OUT.get(decision.action, "dropped"))
        self._wake.set()

    def _drop(self, lease: Lease, reason: str, what: str = "dropped") -> None:
        self._ledger.drop(lease, reason)
        log.warning("scenario %d of epoch %d is %s: %s", lease.ordinal, lease.epoch, what, reason)

    def _release_stale(self, lease: Lease, policy: PolicyVersion, running: _Running) -> None:
        """Releases the scenario of a group that became too old while it ran."""
        assert self.policy is not None
        self._ledger.release(lease, f"stale: version {policy.step} while it ran")
        self._exhausted = False
        seconds = asyncio.get_running_loop().time() - running.at
        self._count_stale(lease, age=self.policy.step - policy.step, seconds=seconds, tokens=0)

    def _count_stale(self, lease: Lease, *, age: int, seconds: float, tokens: int) -> None:
        self._progress.count_stale(age=age, seconds=seconds, tokens=tokens)
        log.info(
            "scenario %d of epoch %d is retried: its group was %d steps old, after %.1f s and %s",
            *(lease.ordinal, lease.epoch, age, seconds),
            f"{tokens} sampled tokens" if tokens else "before its end",
        )

    def _group_failed(self, lease: Lease, error: KestrlError) -> None:
        """Handles the failure of a whole group: of the worker, the stream or a deadline."""
        failure = error.failure(component="rollout")
        if failure.code in NOT_STARTED_CODES:
            self._ledger.release(lease, failure.code)
            self._exhausted = False
            return
        if isinstance(error, NoWorker):
            raise error
        self._progress.count_rollout_failure(failure)
        reason = str(failure)[:500]
        if failure.retryable and lease.failures + 1 < MAX_ATTEMPTS:
            self._retry(lease, reason)
            return
        size = self._settings.algorithm.group_size
        self._failure_share.add(size, [failure] * size)
        self._drop(lease, reason)

    def _retry(self, lease: Lease, reason: str) -> None:
        log.warning("scenario %d of epoch %d is retried: %s", lease.ordinal, lease.epoch, reason)
        self._ledger.release(lease, reason, failed=True)
        self._exhausted = False
        self._pause.start(self._wake.set)

    async def take(self, step: int) -> list[ReadyGroup]:
        """The groups of a step, ordered by policy version, then by position.

        Fewer than groups_per_step when the scenarios have run out or at the step's deadline, at which missing groups
        are cancelled and retried; none while draining. Groups that are too stale are released on the way, each exactly
        once.

        Raises:
            StepDeadline: No group was complete by the deadline.
        """
        wanted, seconds = self._settings.algorithm.groups_per_step, self._settings.step_seconds
        try:
            async with asyncio.timeout(seconds):
                while not self._step_complete(step, wanted):
                    if self.draining:
                        return []
                    await self._progress.changed()
        except TimeoutError:
            await self._cancel_late(wanted)
            self._evict(step)
            if not self._ready:
                raise StepDeadline(
                    f"no group of step {step} was complete within {seconds:g} s; check what the episodes wait for, or "
                    "raise spec.rollout.deadlines.step"
                ) from None
        self._ready.sort(key=lambda ready: (ready.policy.step, ready.lease.position))
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        self._consumed += wanted
        self._progress.update(groups_ready=len(self._ready))
        self._failure_share.reset()
        self._dynamic_sampling.reset()
        self._wake.set()
        return taken

    def _step_complete(self, step: int, wanted: int) -> bool:
        """Whether a step has all groups it can get, and need not wait for a running group that it would make too
        old.
        """
        self._evict(step)
        if self._exhausted and not self._running:
            return True
        return len(self._ready) >= wanted and not self._must_wait(step)

    def _must_wait(self, step: int) -> bool:
        """Whether the step must wait for running groups that would otherwise be too old for every later step."""
        if self._settings.stale_groups == "release":
            return False
        given_up, algorithm = self._outdated | self._late, self._settings.algorithm
        return not affordable(
            step=step,
            max_staleness=algorithm.max_staleness,
            groups_per_step=algorithm.groups_per_step,
            ready=[ready.policy.step for ready in self._ready],
            running=[running.policy.step for task, running in self._running.items() if task not in given_up],
        )

    async def _cancel_late(self, wanted: int) -> None:
        """Cancels the groups that a step still waits for, the first dispatched first; the others belong to the next
        step.
        """
        running = sorted(self._running.keys() - self._outdated, key=lambda task: self._running[task].position)
        late = running[: max(0, wanted - len(self._ready))]
        self._late.update(late)
        for task in late:
            self._end(task)
        if late:
            log.warning(
                "the step's deadline passed: %d of %d groups are complete, the others are cancelled and retried",
                len(self._ready),
                wanted,
            )
            await asyncio.wait(late)

    def _evict(self, step: int) -> None:
        for ready in [item for item in self._ready if step - item.policy.step > self._settings.algorithm.max_staleness]:
            self._ready.remove(ready)
            self._ledger.release(ready.lease, f"stale: version {ready.policy.step} at step {step}", leaves="finished")
            self._exhausted = False
            self._count_stale(
                ready.lease,
                age=step - ready.policy.step,
                seconds=max((episode.seconds for episode in ready.group.episodes), default=0.0),
                tokens=sum(sum(row.mask) for episode in ready.group.episodes for row in episode.rows),
            )
            self._wake.set()
