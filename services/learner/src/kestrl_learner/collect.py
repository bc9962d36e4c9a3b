"""Keeps rollouts going and hands groups to the step: admission by staleness, fate of each group, the ledger kept true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.errors import Failure, KestrlError
from kestrl.plan.settings import LearnerSettings
from kestrl_learner.engines import Engines
from kestrl_learner.ledger import Lease, Ledger
from kestrl_learner.progress import Progress
from kestrl_learner.schedule import admissible, group_seed
from kestrl_learner.verdict import MAX_ATTEMPTS, Fate, decide
from kestrl_learner.workers import Order, Workers

log = logging.getLogger(__name__)


class TooManyFailures(KestrlError):
    """More episodes fail for reasons other than the policy than the job allows."""

    code = "too_many_failures"


@dataclass(frozen=True, slots=True)
class Ready:
    """A group that waits to be trained on."""

    lease: Lease
    group: Group
    policy: PolicyVersion


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
    ) -> None:
        self._settings, self._scenarios, self._ledger = settings, scenarios, ledger
        self._workers, self._engines, self._progress = workers, engines, progress
        self._ready: list[Ready] = []
        self._running: dict[asyncio.Task[None], PolicyVersion] = {}
        self._consumed = 0
        self._exhausted = False
        self._wake = asyncio.Event()
        self._fault: BaseException | None = None
        self._seen = self._failed = 0
        self._last_failure: Failure | None = None
        self.policy: PolicyVersion | None = None
        self.draining = False

    def begin(self, policy: PolicyVersion, consumed: int) -> None:
        """Starts from a published version, after so many consumed groups."""
        self.policy, self._consumed = policy, consumed
        self._wake.set()

    def advance(self, policy: PolicyVersion) -> None:
        """A newer version is proved: new groups use it."""
        self.policy = policy
        self._wake.set()

    def wake(self) -> None:
        """Something changed that may let a group start."""
        self._wake.set()

    def named(self) -> set[str]:
        """Versions that running groups name."""
        return {policy.name for policy in self._running.values()}

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
        if policy is None or self.draining or self._exhausted:
            return
        engines = self._engines.proved(policy)
        if not engines:
            return
        algorithm = self._settings.algorithm
        may = admissible(
            version=policy.step,
            max_staleness=algorithm.max_staleness,
            groups_per_step=algorithm.groups_per_step,
            consumed=self._consumed,
            outstanding=len(self._running) + len(self._ready),
        )
        for _ in range(min(may, self._workers.room(algorithm.group_size))):
            lease = self._ledger.lease(policy.step)
            if lease is None:
                self._exhausted = True
                self._progress.update()
                return
            task = tasks.create_task(self._run(lease, policy), name=f"group-{lease.position}")
            self._running[task] = policy
            task.add_done_callback(self._ended)
            self._progress.update(groups_running=len(self._running))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._progress.update(groups_running=len(self._running))
        self._wake.set()

    async def _run(self, lease: Lease, policy: PolicyVersion) -> None:
        settings = self._settings
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
        try:
            group = await self._workers.run(order)
        except KestrlError as error:
            self._lost(lease, error.failure(component="rollout"))
            return
        verdict = decide(
            group,
            policy=policy,
            engines=[engine.name for engine in engines],
            algorithm=settings.algorithm,
            attempt=lease.attempt,
        )
        self._account(len(group.episodes), verdict.failures)
        if verdict.fate is Fate.TRAIN:
            self._ledger.finish(lease)
            self._ready.append(Ready(lease, verdict.group, policy))
            self._progress.add(verdict.group.episodes)
            self._wake.set()
        elif verdict.fate is Fate.RETRY:
            self._give_back(lease, verdict.reason)
        else:
            self._ledger.drop(lease, verdict.reason)
            log.warning("scenario %d of epoch %d is dropped: %s", lease.ordinal, lease.epoch, verdict.reason)

    def _lost(self, lease: Lease, failure: Failure) -> None:
        """The group as a whole failed: the worker, the stream or a deadline."""
        self._account(self._settings.algorithm.group_size, [failure] * self._settings.algorithm.group_size)
        reason = str(failure)[:500]
        if failure.retryable and lease.attempt + 1 < MAX_ATTEMPTS:
            self._give_back(lease, reason)
        else:
            self._ledger.drop(lease, reason)
            log.warning("scenario %d of epoch %d is dropped: %s", lease.ordinal, lease.epoch, reason)

    def _give_back(self, lease: Lease, reason: str) -> None:
        log.warning("scenario %d of epoch %d is attempted again: %s", lease.ordinal, lease.epoch, reason)
        self._ledger.release(lease, reason)
        self._exhausted = False

    def _account(self, episodes: int, failures: Sequence[Failure]) -> None:
        """Counts, and stops the run when too large a share of the last episodes failed.

        Raises:
            TooManyFailures: The share is above the job's.
        """
        self._seen += episodes
        self._failed += len(failures)
        for failure in failures:
            self._last_failure = failure
            self._progress.count_failure(failure)
        algorithm = self._settings.algorithm
        enough = algorithm.groups_per_step * algorithm.group_size
        if self._seen >= enough and self._failed > self._settings.max_failed_share * self._seen:
            raise TooManyFailures(
                f"{self._failed} of the last {self._seen} episodes failed for reasons other than the policy "
                f"(allowed share {self._settings.max_failed_share:g}); the last: {self._last_failure}"
            )

    async def take(self, step: int) -> list[Ready]:
        """The groups of a step, by position; fewer than groups_per_step only when scenarios have run out.

        Too stale ones are given back on the way, so that each is refilled exactly once.
        """
        wanted = self._settings.algorithm.groups_per_step
        while True:
            self._evict(step)
            if len(self._ready) >= wanted or ((self._exhausted or self.draining) and not self._running):
                break
            await self._progress.changed()
        self._ready.sort(key=lambda ready: ready.lease.position)
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        self._consumed += wanted
        self._seen = self._failed = 0
        self._wake.set()
        return taken

    def _evict(self, step: int) -> None:
        for ready in [item for item in self._ready if step - item.policy.step > self._settings.algorithm.max_staleness]:
            self._ready.remove(ready)
            self._ledger.release(ready.lease, f"stale: version {ready.policy.step} at step {step}", leaves="finished")
            self._exhausted = False
            self._wake.set()
