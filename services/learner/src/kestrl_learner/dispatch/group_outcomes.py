"""What becomes of groups that have ended: decided, and recorded in the ledger, the queue and the progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl.algorithms import Algorithm
from kestrl.episode import Group, PolicyVersion, Scenario
from kestrl.errors import Boundary, Failure, KestrlError
from kestrl.runstate.events import GroupOutdated, TokensMasked
from kestrl.storage.episodes import GroupOutcome, StoredGroup
from kestrl_learner.dispatch.acceptance import LEFT_OUT, MAX_ATTEMPTS, GroupAction, GroupDecision, decide
from kestrl_learner.dispatch.dynamic_sampling import DynamicSampling
from kestrl_learner.dispatch.failure_share import FailureShare
from kestrl_learner.dispatch.group_assignment import GroupAssignment
from kestrl_learner.dispatch.group_queue import GroupQueue, ReadyGroup
from kestrl_learner.dispatch.leases import ScenarioLeases
from kestrl_learner.dispatch.retry_pause import RetryPause
from kestrl_learner.dispatch.workers import EnginesAway, NoWorker, WorkerAway
from kestrl_learner.engines.engines import Engines
from kestrl_learner.ledger import Lease
from kestrl_learner.progress.progress import Progress
from kestrl_learner.store.ended_groups import EndedGroups

log = logging.getLogger(__name__)
NOT_STARTED_CODES = frozenset({"draining", "drained", WorkerAway.code, EnginesAway.code})
"""Failure codes of workers and engines that left before the group began; they are no failures of the scenario."""

OUTCOMES = {
    GroupAction.RETRY: GroupOutcome.RETRIED,
    GroupAction.DROP: GroupOutcome.DROPPED,
    GroupAction.MASK: GroupOutcome.MASKED,
    GroupAction.SKIP: GroupOutcome.SKIPPED,
}
"""Stored outcomes of groups that are not trained on."""
REJECTED = "dynamic sampling: the algorithm rejected the group's rewards"
STORED_STEPS = 4
"""Groups without a step that are kept for the next file, in steps' worth of groups."""
LEAST_STORED = 64
"""At least so many are kept."""


class GroupOutcomes:
    """Takes the groups that have ended to the queue, back to the ledger, or out of the run.

    Args:
        settings: The run's settings.
        leases: Where scenarios are released and dropped.
        queue: Where complete groups wait for their step.
        engines: Engines, of which those that failed are suspected.
        progress: Where failures, means and stale groups are counted.
        vocabulary: Size of the model's vocabulary.
        algorithm: Accepts or rejects groups by their rewards.
        scenarios: By ordinal; groups that fail as a whole are stored with them.
        resume: Called when the pause after a failure is over.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        leases: ScenarioLeases,
        queue: GroupQueue,
        engines: Engines,
        progress: Progress,
        vocabulary: int,
        algorithm: Algorithm,
        scenarios: Sequence[Scenario],
        *,
        resume: Callable[[], None],
    ) -> None:
        self._settings, self._leases, self._queue = settings, leases, queue
        self._engines, self._progress, self._vocabulary = engines, progress, vocabulary
        self._scenarios, self._resume = scenarios, resume
        self.pause = RetryPause()
        self._failure_share = FailureShare(settings.max_failed_share, settings.algorithm)
        at_most = settings.algorithm.max_sampled_batches * settings.algorithm.groups_per_step
        self._dynamic_sampling = DynamicSampling(algorithm, at_most=at_most)
        self._unused = EndedGroups(max(LEAST_STORED, STORED_STEPS * settings.algorithm.groups_per_step))

    def taken(self, groups: Sequence[ReadyGroup], step: int) -> list[ReadyGroup]:
        """The groups that the step after `step` steps takes, with tokens that are too old as context; starts the counts
        of the next step.
        """
        masked_groups = [ready.without_older(self._first_step(step)) for ready in groups]
        self._progress.emit(TokensMasked(tokens=sum(count for _, count in masked_groups)))
        self._progress.observe(groups_ready=len(self._queue))
        self._failure_share.reset()
        self._dynamic_sampling.reset()
        return [ready for ready, _ in masked_groups]

    def _first_step(self, step: int) -> int:
        """Step of the oldest version whose tokens the step after `step` steps is trained on."""
        return step - self._settings.algorithm.token_staleness

    def ended(
        self,
        lease: Lease,
        request: GroupAssignment,
        policy: PolicyVersion,
        group: Group,
        *,
        proved: Mapping[PolicyVersion, Collection[str]],
    ) -> None:
        """Handles a group that ran to its end.

        Args:
            lease: The scenario's lease.
            request: What was asked for.
            policy: The requested version.
            group: The answer.
            proved: Names of the engines that had proved each version that may have sampled a turn, while it ran.

        Raises:
            KestrlError: Too many episodes failed, or too many groups were rejected or not scored.
        """
        decision = decide(
            group,
            scenario=request.scenario,
            policy=policy,
            proved=proved,
            algorithm=self._settings.algorithm,
            vocabulary=self._vocabulary,
            failures_before=lease.failures,
        )
        if decision.refused is not None:
            self._await_credential(lease, decision, decision.refused, group)
            return
        engines = {name for names in proved.values() for name in names}
        self._count(lease, decision, engines, episodes=len(group.episodes))
        if decision.action is GroupAction.TRAIN:
            steps = {version.name: version.step for version in proved}
            whole_group = None if decision.group is group else group
            self._accept(ReadyGroup(lease, decision.group, policy, steps, whole_group))
            return
        self._store(lease, OUTCOMES[decision.action], decision.reason, group)
        if decision.action is GroupAction.RETRY:
            self._retry(lease, decision.reason)
        else:
            self._drop(lease, decision.reason, LEFT_OUT.get(decision.action, "dropped"))

    def _await_credential(self, lease: Lease, decision: GroupDecision, refused: Failure, group: Group) -> None:
        """Has a scenario wait for a credential: that it was refused is no failed attempt, and none of the run's."""
        for failure in decision.failures:
            self._progress.count_rollout_failure(failure)
        self._progress.await_credential(refused)
        self._store(lease, GroupOutcome.RETRIED, decision.reason, group)
        self._leases.release(lease, decision.reason)
        self.pause.start(self._resume)

    def take_ended(self) -> list[StoredGroup]:
        """The groups that ended since the last call and that no step will get."""
        return self._unused.take()

    def _store(
        self, lease: Lease, outcome: GroupOutcome, reason: str, group: Group | None = None, cause: Failure | None = None
    ) -> None:
        """Keeps a group, or one without episodes that failed as a whole, for the next step's file."""
        if group is None:
            scenario = self._scenarios[lease.ordinal]
            group = Group(id=lease.group_id(self._settings.run), scenario=scenario, episodes=())
        self._unused.add(StoredGroup(group=group, outcome=outcome, attempt=lease.attempt, reason=reason, failure=cause))

    def _count(self, lease: Lease, decision: GroupDecision, engines: Collection[str], *, episodes: int) -> None:
        for failure in decision.failures:
            self._progress.count_rollout_failure(failure)
        if any(failure.boundary is Boundary.ENGINE and failure.retryable for failure in decision.failures):
            self._engines.suspect(engines)
        if decision.action is GroupAction.SKIP:
            self._progress.skip("train", lease.ordinal)
        elif decision.action is GroupAction.MASK:
            self._failure_share.add_unscored(decision.reason)
        elif decision.action is not GroupAction.RETRY:
            self._failure_share.add(episodes, decision.failures)

    def _accept(self, ready: ReadyGroup) -> None:
        lease, group = ready.lease, ready.group
        self.pause.reset()
        self._progress.add(group)
        self._progress.accept_credential(group)
        if not self._dynamic_sampling.accepts(group):
            self._store(lease, GroupOutcome.DROPPED, REJECTED, ready.whole or group)
            self._leases.drop(lease, REJECTED)
            return
        self._leases.finish(lease)
        self._queue.put(ready)
        self._progress.observe(groups_ready=len(self._queue))

    def failed(self, lease: Lease, error: KestrlError) -> None:
        """Handles the failure of a whole group: of the worker, the stream or a deadline.

        Raises:
            NoWorker: No worker came; ends the run.
            TooManyFailures: Too many episodes failed.
        """
        failure = error.failure(component="rollout")
        if failure.code in NOT_STARTED_CODES:
            self._leases.release(lease, failure.code)
            return
        if isinstance(error, NoWorker):
            raise error
        self._progress.count_rollout_failure(failure)
        reason = str(failure)[:500]
        if failure.retryable and lease.failures + 1 < MAX_ATTEMPTS:
            self._store(lease, GroupOutcome.RETRIED, reason, cause=failure)
            self._retry(lease, reason)
            return
        self._store(lease, GroupOutcome.DROPPED, reason, cause=failure)
        self._fail_whole(failure)
        self._drop(lease, reason)

    def _fail_whole(self, failure: Failure) -> None:
        size = self._settings.algorithm.group_size
        self._failure_share.add(size, [failure] * size)

    def _retry(self, lease: Lease, reason: str) -> None:
        log.warning("scenario %d of epoch %d is retried: %s", lease.ordinal, lease.epoch, reason)
        self._leases.release(lease, reason, failed=True)
        self.pause.start(self._resume)

    def _drop(self, lease: Lease, reason: str, outcome: str = "dropped") -> None:
        self._leases.drop(lease, reason)
        log.warning("scenario %d of epoch %d is %s: %s", lease.ordinal, lease.epoch, outcome, reason)

    def outdated(self, lease: Lease, policy: PolicyVersion, *, age: int, seconds: float) -> None:
        """Releases the scenario of a group that became too old while it ran."""
        reason = f"stale: version {policy.step} while it ran"
        self._store(lease, GroupOutcome.STALE, reason)
        self._leases.release(lease, reason)
        self._count_stale(lease, age=age, seconds=seconds, tokens=0)

    def evict(self, step: int) -> int:
        """Releases the scenarios of waiting groups that are too old for a step, each exactly once; returns how many."""
        older = self._queue.take_older(self._first_step(step))
        for ready in older:
            reason = f"stale: version {ready.newest} at step {step + 1}"
            self._store(ready.lease, GroupOutcome.STALE, reason, ready.whole or ready.group)
            self._leases.release_finished(ready.lease, reason)
            self._count_stale(
                ready.lease,
                age=step - ready.newest,
                seconds=max((episode.seconds for episode in ready.group.episodes), default=0.0),
                tokens=sum(sum(row.mask) for episode in ready.group.episodes for row in episode.rows),
            )
        return len(older)

    def _count_stale(self, lease: Lease, *, age: int, seconds: float, tokens: int) -> None:
        self._progress.emit(GroupOutdated(age=age, seconds=seconds, tokens=tokens))
        log.info(
            "scenario %d of epoch %d is retried: its group was %d steps old, after %.1f s and %s",
            *(lease.ordinal, lease.epoch, age, seconds),
            f"{tokens} sampled tokens" if tokens else "before its end",
        )
