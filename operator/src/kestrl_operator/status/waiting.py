"""Pods that cannot start, and jobs that hold others while they cannot use them. Pure.

Without a queue nobody admits a job as a whole: two jobs can each hold the devices that the other waits for. A job gives
its pods back then, and tries again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kestrl._shared.plan.components import Role
from kestrl.runstate.states import RunPhase
from kestrl_operator.state.cluster import replicas
from kestrl_operator.state.snapshot import STORAGE_AWAY, Pod, Rest, Snapshot
from kestrl_operator.status.pods import ROLLING

PARTLY_SECONDS = 300.0
"""Seconds for which a job that has nodes for a part of its pods waits for the others beside other such jobs."""
BLOCKED_SECONDS = 900.0
"""Seconds for which a job that cannot start holds its pods."""
FIRST_REST, LONGEST_REST = 60.0, 600.0
"""First and longest time without pods before the next attempt; doubled each time until the job trains a step."""
KEEPS_ENDING = 5
"""Restarts after which a pod that is not ready counts as one that cannot start."""
INDISPENSABLE = (Role.LEARNER, Role.RANKS)
"""Roles of which each pod is needed; of the others one is enough."""
TRAINS = frozenset({RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.DRAINING})


def stuck(snapshot: Snapshot) -> list[Pod]:
    """Pods that have not started and wait for a node, an image, a volume or a secret, or whose preparation fails; the
    longest waiting first.

    A pod that a queue holds back waits for none of these.
    """
    waiting = [
        pod
        for pod in snapshot.staying
        if pod.phase == "Pending" and not pod.gated and (pod.unstartable or pod.ended or not pod.begun)
    ]
    return sorted(waiting, key=lambda pod: (pod.made, pod.name))


def waits_for(pod: Pod) -> str:
    """The reason why a pod has not started."""
    if pod.unstartable or pod.unscheduled or pod.ended:
        return pod.unstartable or pod.unscheduled or str(pod.ended[0])
    return "its containers are not created; see its events" if pod.scheduled else "it is not scheduled"


def is_partly_scheduled(pods: Iterable[Pod]) -> bool:
    """Whether some pods of a job have nodes, and others find none."""
    staying = [pod for pod in pods if not pod.over and not pod.deleting]
    return any(pod.scheduled for pod in staying) and any(pod.unscheduled for pod in staying)


def rest_of(snapshot: Snapshot) -> Rest | None:
    """The present rest of a job without pods, the one that begins now, or the last one, which is remembered until the
    job trains a step; None if there is none.

    A job in a queue never rests: the queue decides. Another spec ends a rest.
    """
    if snapshot.queue is not None:
        return None
    last = snapshot.memory.rest
    if last is not None and last.generation != snapshot.generation:
        last = None
    if last is not None and snapshot.now < last.until:
        return last
    if _trains(snapshot) and _has_stepped(snapshot):
        return None
    reason = next((reason for since, patience, reason in _held_up(snapshot) if snapshot.now >= since + patience), "")
    if not reason:
        return last
    times = 0 if last is None else last.times
    return Rest(
        generation=snapshot.generation,
        since=snapshot.now if last is None else last.since,
        until=snapshot.now + min(LONGEST_REST, FIRST_REST * 2.0 ** min(times, 16)),
        times=times + 1,
        why=reason,
    )


def seconds_to_rest(snapshot: Snapshot) -> float | None:
    """Seconds after which the job may have to rest; None if nothing holds it up."""
    if snapshot.queue is not None:
        return None
    remaining_seconds = [since + patience - snapshot.now for since, patience, _ in _held_up(snapshot)]
    if not _trains(snapshot) and is_partly_scheduled(snapshot.pods):
        remaining_seconds.append(PARTLY_SECONDS)  # a younger job may have given its pods back by then
    return min((seconds for seconds in remaining_seconds if seconds > 0), default=None)


def refused_since(snapshot: Snapshot) -> float | None:
    """Since when the learner waits for a tool's credential; None if it waits for none."""
    live = snapshot.live_report
    if live is None or not live.state.tools.wait:
        return None
    return snapshot.now if snapshot.memory.refused is None else snapshot.memory.refused


def _trains(snapshot: Snapshot) -> bool:
    live = snapshot.live_report
    return live is not None and live.phase in TRAINS


def _has_stepped(snapshot: Snapshot) -> bool:
    """Whether the job has ever trained a step: what has worked is waited for with all pods."""
    last = snapshot.last_report
    return (last is not None and last.state.steps.done > 0) or snapshot.status.get("progress", {}).get("step", 0) > 0


def _held_up(snapshot: Snapshot) -> Iterator[tuple[float, float, str]]:
    """What keeps the job from its start or its first step: since when, for how long it may hold pods meanwhile, and
    why.
    """
    if not _trains(snapshot):
        yield from _held_up_before_training(snapshot)
    if not _has_stepped(snapshot):
        yield from _held_up_before_a_step(snapshot)


def _held_up_before_training(snapshot: Snapshot) -> Iterator[tuple[float, float, str]]:
    waiting = stuck(snapshot)
    broken = [pod for pod in waiting if pod.scheduled and (pod.unstartable or pod.ended)]
    if broken:
        yield broken[0].made, BLOCKED_SECONDS, f"{broken[0].name} cannot start: {waits_for(broken[0])}"
    yield from _held_beside_missing_pods(snapshot)
    short = [pod for pod in waiting if pod.unscheduled]
    if snapshot.yields and short and is_partly_scheduled(snapshot.pods):
        reason = f"older jobs wait for nodes, too; {short[0].name}: {short[0].unscheduled}"
        yield short[0].made, PARTLY_SECONDS, reason


def _held_up_before_a_step(snapshot: Snapshot) -> Iterator[tuple[float, float, str]]:
    """Also of a learner that reports that it trains: without episodes it waits for them without end."""
    if away := _storage_away(snapshot):
        since = min((pod.made for pod in snapshot.staying if pod.scheduled), default=snapshot.now)
        yield since, BLOCKED_SECONDS, f"storage cannot be used: {away}"
    refused, live = refused_since(snapshot), snapshot.live_report
    if refused is not None and live is not None:
        yield refused, BLOCKED_SECONDS, live.state.tools.wait
    for role in (*ROLLING, Role.INFERENCE, *INDISPENSABLE):
        pods = sorted(snapshot.of(role), key=lambda pod: (pod.made, pod.name))
        broken = [pod for pod in pods if pod.unstartable or _keeps_ending(pod)]
        if broken and (role in INDISPENSABLE or not any(pod.ready for pod in pods)):
            yield broken[0].made, BLOCKED_SECONDS, f"{broken[0].name} cannot start: {waits_for(broken[0])}"
    if _misses_a_role(snapshot):
        yield from _held_beside_missing_pods(snapshot)


def _keeps_ending(pod: Pod) -> bool:
    """Whether a pod has ended too often; one that loads a model again may take any time, and succeed."""
    if pod.restarts < KEEPS_ENDING:
        return False
    return any(not end.running or pod.role in ROLLING for end in pod.ended)


def _held_beside_missing_pods(snapshot: Snapshot) -> Iterator[tuple[float, float, str]]:
    """For a job that has nodes for some pods while others cannot be created."""
    if snapshot.not_created is not None and any(pod.scheduled for pod in snapshot.staying):
        since, reason = snapshot.not_created
        yield since, BLOCKED_SECONDS, reason


def _misses_a_role(snapshot: Snapshot) -> bool:
    """Whether no pod of a role is there without which no episode ends."""
    if snapshot.job is None:
        return False
    desired_replicas = replicas(snapshot.job.spec, snapshot.workloads)
    return any(desired_replicas.get(role) and not snapshot.of(role) for role in ROLLING)


def _storage_away(snapshot: Snapshot) -> str:
    """What the learner says of storage that cannot be used."""
    live = snapshot.live_report
    if live is None:
        return ""
    if live.failure is not None and live.failure.code in STORAGE_AWAY:
        return live.failure.message
    return live.state.storage.wait if live.phase is RunPhase.STARTING else ""
