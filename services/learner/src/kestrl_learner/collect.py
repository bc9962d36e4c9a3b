"""Keeps rollouts going and hands groups to the step: admission by staleness, fate of each group, the ledger kept true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.algorithms import Algorithm
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.errors import Boundary, KestrlError
from kestrl.plan.settings import LearnerSettings
from kestrl.telemetry.metrics import observe
from kestrl.telemetry.names import Metric
from kestrl_learner.admission import Admission
from kestrl_learner.dynamic_sampling import DynamicSampling
from kestrl_learner.engines import Engines
from kestrl_learner.failure_share import FailureShare
from kestrl_learner.ledger import Lease, Ledger
from kestrl_learner.progress import Progress
from kestrl_learner.retry_pause import RetryPause
from kestrl_learner.schedule import admissible, affordable, group_seed
from kestrl_learner.verdict import MAX_ATTEMPTS, Fate, decide
from kestrl_learner.workers import NoWorker, Order, WorkerAway, Workers

log = logging.getLogger(__name__)


HANDED_BACK = frozenset({"draining", "drained", WorkerAway.code})
"""Codes of a worker that is leaving or gone before it began: the scenario has not failed."""


class StepDeadline(KestrlError):
    """A step has waited for its groups for as long as the job lets it."""

    code = "step_deadline"
    retryable = True


@dataclass(frozen=True, slots=True)
class Ready:
    """A group that waits to be trained on."""

    lease: Lease
    group: Group
    policy: PolicyVersion


@dataclass(slots=True)
class _Running:
    """A group that runs."""

    position: int
    policy: PolicyVersion
    episodes: int
    """Those of it that have not ended."""
    at: float
    """When it was handed out, by the loop's clock."""
    begun: bool = False
    """Whether its task ran at all."""


class Collector:
    """Rollouts for training."""

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
        self._ready: list[Ready] = []
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._consumed = 0
        self._exhausted = False
        self._wake = asyncio.Event()
        self._outdated: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        """Cancelled, since their step waited long enough."""
        self._pause = RetryPause()
        self._admission = Admission(settings.algorithm.group_size)
        self._lowest: int | None = None
        observe(Metric.ADMISSION, lambda: self._admission.limit or self._workers.capacity)
        per_step = settings.algorithm.groups_per_step
        self._failure_share = FailureShare(settings.max_failed_share, at_least=per_step * settings.algorithm.group_size)
        self._dynamic_sampling = DynamicSampling(algorithm, at_most=settings.algorithm.max_sampled_batches * per_step)
        self.policy: PolicyVersion | None = None
        self.draining = False

    def begin(self, policy: PolicyVersion, consumed: int) -> None:
        """Starts from a published version, after so many consumed groups."""
        self.policy, self._consumed = policy, consumed
        self._wake.set()

    def advance(self, policy: PolicyVersion) -> None:
        """A newer version is proved: new groups use it, and those that it makes too old to be trained on are given up.

        They would be given back when they end, and until then their version would hold an adapter slot.
        """
        self.policy = policy
        for task, running in self._running.items():
            if policy.step - running.policy.step > self._settings.algorithm.max_staleness:
                self._outdated.add(task)
                self._end(task)
        self._wake.set()

    def look_at_engines(self) -> None:
        """An engine told how busy it is."""
        before = self._admission.limit
        self._admission.look(self._engines.loads(), running=self._episodes(), most=self._workers.capacity)
        now = self._admission.limit
        if now == before:
            return
        if now is not None and (self._lowest is None or now < self._lowest):
            # Told when it is lower than ever, not at every change: it changes for as long as the run lasts.
            log.info("the engines' load allows %d episodes at once", now)
            self._lowest = now
        self._wake.set()

    def _episodes(self) -> int:
        """Episodes that run for training; of a group that waits for one straggler, one."""
        return sum(running.episodes for running in self._running.values())

    def wake(self) -> None:
        """Something changed that may let a group start."""
        self._wake.set()

    def named(self) -> set[str]:
        """Versions that running groups name."""
        return {running.policy.name for task, running in self._running.items() if task not in self._outdated}

    async def feed(self) -> None:
        """Starts groups as far as staleness, workers and scenarios allow, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._start_what_may(tasks)
                    await self._wake.wait()
                    self._wake.clear()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _start_what_may(self, tasks: asyncio.TaskGroup) -> None:
        policy = self.policy
        if policy is None or self.draining or self._exhausted or self._pause.active:
            return
        engines = self._engines.proved(policy)
        if not engines:
            return
        algorithm = self._settings.algorithm
        outstanding = len(self._running) - len(self._outdated) + len(self._ready)
        may = admissible(
            version=policy.step,
            max_staleness=algorithm.max_staleness,
            groups_per_step=algorithm.groups_per_step,
            consumed=self._consumed,
            outstanding=outstanding,
        )
        may = min(may, self._groups - self._consumed - outstanding)
        may = min(may, self._workers.room(algorithm.group_size))
        allowed = self._admission.groups(self._episodes())
        for _ in range(may if allowed is None else min(may, allowed)):
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
        """Ends a group. One that has not begun sees so by itself: cancelled before it ran, it would never give its scenario back."""
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
        order = Order(
            group_id=lease.group_id(settings.run),
            scenario=self._scenarios[lease.ordinal],
            size=settings.algorithm.group_size,
            policy=policy,
            engines=engines,
            temperature=settings.temperature,
            seed=group_seed(settings.seed, lease.epoch, lease.ordinal),
            purpose="train",
        )
        self._running[task].begun = True
        try:
            if task in self._late or task in self._outdated:
                raise asyncio.CancelledError
            group = await self._workers.run(order, lambda count: self._episodes_ended(task, count))
        except asyncio.CancelledError:
            # By `advance` or a step's deadline alone: the task ends in order. Nothing below this awaits, so it cannot come elsewhere.
            if task in self._late:
                self._lost(lease, StepDeadline(f"not whole after the {settings.step_seconds:g} s that its step waits"))
                return
            if task not in self._outdated:
                raise
            self._outgrown(lease, policy, self._running[task])
            return
        except KestrlError as error:
            self._lost(lease, error)
            return
        verdict = decide(
            group,
            scenario=order.scenario,
            policy=policy,
            engines=[engine.name for engine in engines],
            algorithm=settings.algorithm,
            vocabulary=self._vocabulary,
            failures_before=lease.failures,
        )
        for failure in verdict.failures:
            self._progress.count_failure(failure)
        if any(failure.boundary is Boundary.ENGINE and failure.retryable for failure in verdict.failures):
            self._engines.doubt(engine.name for engine in engines)
        if verdict.fate is Fate.SKIP:
            self._ledger.drop(lease, verdict.reason)
            self._progress.skip("train", lease.ordinal)
            log.warning("scenario %d of epoch %d is skipped: %s", lease.ordinal, lease.epoch, verdict.reason)
            self._wake.set()
            return
        if verdict.fate is not Fate.RETRY:
            self._failure_share.add(len(group.episodes), verdict.failures)
        if verdict.fate is Fate.TRAIN:
            self._pause.reset()
            self._progress.add(verdict.group.episodes)
            if self._dynamic_sampling.accepts(verdict.group):
                self._ledger.finish(lease)
                self._ready.append(Ready(lease, verdict.group, policy))
                self._progress.groups_ready = len(self._ready)
            else:
                self._ledger.drop(lease, "dynamic sampling: the algorithm refused the group's rewards")
            self._wake.set()
        elif verdict.fate is Fate.RETRY:
            self._give_back(lease, verdict.reason)
        else:
            self._ledger.drop(lease, verdict.reason)
            log.warning("scenario %d of epoch %d is dropped: %s", lease.ordinal, lease.epoch, verdict.reason)

    def _outgrown(self, lease: Lease, policy: PolicyVersion, running: _Running) -> None:
        """Gives back the scenario of a group that grew too old while it ran."""
        assert self.policy is not None
        self._ledger.release(lease, f"stale: version {policy.step} while it ran")
        self._exhausted = False
        seconds = asyncio.get_running_loop().time() - running.at
        self._count_stale(lease, age=self.policy.step - policy.step, seconds=seconds, tokens=0)

    def _count_stale(self, lease: Lease, *, age: int, seconds: float, tokens: int) -> None:
        self._progress.gave_up(age=age, seconds=seconds, tokens=tokens)
        log.info(
            "scenario %d of epoch %d is attempted again: its group was %d steps old, after %.1f s and %s",
            *(lease.ordinal, lease.epoch, age, seconds),
            f"{tokens} sampled tokens" if tokens else "before its end",
        )

    def _lost(self, lease: Lease, error: KestrlError) -> None:
        """The group as a whole did not come: the worker, the stream or a deadline failed."""
        failure = error.failure(component="rollout")
        if failure.code in HANDED_BACK:
            self._ledger.release(lease, failure.code)
            self._exhausted = False
            return
        if isinstance(error, NoWorker):
            raise error
        self._progress.count_failure(failure)
        reason = str(failure)[:500]
        if failure.retryable and lease.failures + 1 < MAX_ATTEMPTS:
            self._give_back(lease, reason)
            return
        size = self._settings.algorithm.group_size
        self._failure_share.add(size, [failure] * size)
        self._ledger.drop(lease, reason)
        log.warning("scenario %d of epoch %d is dropped: %s", lease.ordinal, lease.epoch, reason)

    def _give_back(self, lease: Lease, reason: str) -> None:
        log.warning("scenario %d of epoch %d is attempted again: %s", lease.ordinal, lease.epoch, reason)
        self._ledger.release(lease, reason, failed=True)
        self._exhausted = False
        self._pause.start(self._wake.set)

    async def take(self, step: int) -> list[Ready]:
        """The groups of a step, the oldest policy's first, then by position; fewer than groups_per_step only when scenarios have run out, none while draining.

        Too stale ones are given back on the way, so that each is refilled exactly once. At the step's deadline those that the step still waits for
        are given up, to be attempted again, and fewer are taken.

        Raises:
            StepDeadline: None was whole by then.
        """
        wanted, seconds = self._settings.algorithm.groups_per_step, self._settings.step_seconds
        try:
            async with asyncio.timeout(seconds):
                while not self._enough(step, wanted):
                    if self.draining:
                        return []
                    await self._progress.changed()
        except TimeoutError:
            await self._give_up(wanted)
            self._evict(step)
            if not self._ready:
                raise StepDeadline(
                    f"step {step} waited {seconds:g} s for its groups and none was whole; see what they wait for, or raise "
                    "spec.rollout.deadlines.step"
                ) from None
        self._ready.sort(key=lambda ready: (ready.policy.step, ready.lease.position))
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        self._consumed += wanted
        self._progress.update(groups_ready=len(self._ready))
        self._failure_share.reset()
        self._dynamic_sampling.reset()
        self._wake.set()
        return taken

    def _enough(self, step: int, wanted: int) -> bool:
        """Whether a step has all it can have, and where the job wants that, makes no running group too old."""
        self._evict(step)
        if self._exhausted and not self._running:
            return True
        return len(self._ready) >= wanted and not self._awaited(step)

    def _awaited(self, step: int) -> bool:
        """Whether the step waits for running groups, or some would be too old for every later step."""
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

    async def _give_up(self, wanted: int) -> None:
        """Ends the groups that a step lacks, the first begun first: the others are the next step's."""
        running = sorted(self._running.keys() - self._outdated, key=lambda task: self._running[task].position)
        late = running[: max(0, wanted - len(self._ready))]
        self._late.update(late)
        for task in late:
            self._end(task)
        if late:
            log.warning(
                "the step's deadline: %d of %d groups are whole, the others are given up", len(self._ready), wanted
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
