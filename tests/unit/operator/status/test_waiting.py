"""Jobs that hold pods and cannot start: when they give them back, for how long, and who never does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.samples import (
    NOW,
    all_pods,
    at,
    condition,
    ended,
    failed,
    job,
    learner_report,
    pod,
    refused,
    report,
    snapshot,
    status,
)

from kestrl._shared.plan.components import Role
from kestrl.errors import Boundary
from kestrl_operator.state.snapshot import QUEUE_LABEL, Memory, Pod, Rest, Snapshot
from kestrl_operator.status.build import status_of
from kestrl_operator.status.lifecycle import Decision, Stage, decide
from kestrl_operator.status.waiting import BLOCKED_SECONDS, FIRST_REST, KEEPS_ENDING, LONGEST_REST, PARTLY_SECONDS

UNSCHEDULED = {"scheduled": False, "phase": "Pending", "ready": False, "begun": False, "address": ""}
REFUSED = "search_emails: 401; put the new one into the Secret mail-server"
STEPPED = {"progress": {"step": 3, "totalSteps": 9}}
NO_NODE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
MISSING = 'prepare: CreateContainerConfigError: secret "s3" not found'
DENIED = failed(Boundary.INFRASTRUCTURE, "storage_inaccessible", step=0)


def partly(seconds: float, **changes: Any) -> Snapshot:
    """A job whose learner has a node, and one of whose engines has waited for one for so long."""
    engine = pod(Role.INFERENCE, unscheduled=NO_NODE, made=NOW - seconds, **UNSCHEDULED)
    return snapshot(**({"pods": all_pods(engine), "last_report": None, "yields": True} | changes))


def blocked(seconds: float, **changes: Any) -> Snapshot:
    """A job one of whose pods has been without its Secret for so long."""
    broken = {**UNSCHEDULED, "scheduled": True}
    engine = pod(Role.INFERENCE, unstartable=MISSING, made=NOW - seconds, **broken)
    return snapshot(**({"pods": all_pods(engine), "last_report": None} | changes))


def denied(seconds: float, **changes: Any) -> Snapshot:
    """A job to which storage has been denied for so long."""
    pods = [replace(item, made=NOW - seconds) for item in all_pods()]
    given = {"pods": pods, "last_report": learner_report(DENIED), "status": {}} | changes
    return snapshot(**given)


AGENT_IMAGE = 'agent: ErrImagePull: "registry/agent:2" not found'


def without_agents(seconds: float, *others: Pod, **changes: Any) -> Snapshot:
    """A job whose learner gathers its first step, while no agent's pod has started for so long."""
    broken = {"unstartable": AGENT_IMAGE, "phase": "Pending", "ready": False, "begun": False, "made": NOW - seconds}
    agent = pod(Role.AGENT, **(broken | changes))
    return snapshot(pods=all_pods(agent, *others), last_report=learner_report(report(step=0)))


def crashing(restarts: int, role: Role = Role.TOOLS, *others: Pod, **changes: Any) -> Snapshot:
    """A job of which a pod of a role has ended so often before the first step, and of which no other pod of that role
    is there.
    """
    plain: dict[str, Any] = {"ready": False, "ended": (ended(str(role)),), "made": NOW - BLOCKED_SECONDS}
    broken = pod(role, restarts=restarts, **(plain | changes))
    pods = [item for item in all_pods() if item.role is not role]
    return snapshot(pods=[*pods, broken, *others], last_report=learner_report(report(step=0)))


def not_created(seconds: float, *roles: Role, **changes: Any) -> Snapshot:
    """A job that gathers its first step without pods of some roles, which a webhook has refused for so long."""
    pods = [item for item in all_pods() if item.role not in roles]
    plain = {"last_report": learner_report(report(step=0)), "not_created": (NOW - seconds, "no RuntimeClass")}
    return snapshot(**({"pods": pods} | plain | changes))


def refused_credential(seconds: float, *, step: int = 0, **changes: Any) -> Snapshot:
    """A job one of whose tools has refused its credential for so long."""
    given = {"last_report": learner_report(refused(REFUSED, step=step)), "memory": Memory(refused=NOW - seconds)}
    return snapshot(**(given | changes))


def rest_of(decision: Decision) -> Rest:
    assert (decision.stage, decision.parked) == (Stage.PARKED, True)
    assert decision.memory.rest is not None
    return decision.memory.rest


@pytest.mark.parametrize(
    "held",
    [
        partly(PARTLY_SECONDS),
        blocked(BLOCKED_SECONDS),
        denied(BLOCKED_SECONDS),
        without_agents(BLOCKED_SECONDS),
        crashing(KEEPS_ENDING),
        crashing(KEEPS_ENDING, Role.INFERENCE),
        replace(crashing(KEEPS_ENDING, Role.LEARNER), last_report=None),
        crashing(KEEPS_ENDING, Role.RANKS, pod(Role.RANKS, 1)),
        refused_credential(BLOCKED_SECONDS),
        not_created(BLOCKED_SECONDS, Role.TOOLS),
        not_created(BLOCKED_SECONDS, Role.INFERENCE, last_report=None),
    ],
    ids=["partly scheduled", "a missing secret", "denied storage", "no agent", "tools keep ending",
         "engines keep ending", "the learner keeps ending", "one rank keeps ending",
         "a refused credential", "tools are not created", "engines are not created"],
)  # fmt: skip
def test_a_job_that_cannot_start_gives_its_pods_back(held: Snapshot) -> None:
    decision = decide(held)
    rest = rest_of(decision)
    assert (rest.since, rest.until, rest.times) == (NOW, NOW + FIRST_REST, 1)
    assert decision.requeue_after == FIRST_REST
    assert (decision.attempts, decision.ended) == (0, None)


@pytest.mark.parametrize(
    "held",
    [
        partly(PARTLY_SECONDS - 1),
        partly(PARTLY_SECONDS, yields=False),
        partly(PARTLY_SECONDS, labels={QUEUE_LABEL: "gpus"}),
        partly(PARTLY_SECONDS, last_report=learner_report(report())),
        blocked(BLOCKED_SECONDS - 1),
        blocked(BLOCKED_SECONDS, last_report=learner_report(report())),
        denied(BLOCKED_SECONDS - 1),
        denied(BLOCKED_SECONDS, status=STEPPED),
        without_agents(BLOCKED_SECONDS - 1),
        without_agents(BLOCKED_SECONDS, pod(Role.AGENT, 1)),
        replace(without_agents(BLOCKED_SECONDS), last_report=learner_report(report())),
        replace(without_agents(BLOCKED_SECONDS), status=STEPPED),
        crashing(KEEPS_ENDING - 1),
        crashing(KEEPS_ENDING - 1, Role.INFERENCE),
        crashing(KEEPS_ENDING, Role.INFERENCE, pod(Role.INFERENCE, 1)),
        crashing(KEEPS_ENDING, Role.INFERENCE, ended=(replace(ended("engine"), running=True),)),
        crashing(KEEPS_ENDING, Role.INFERENCE, made=NOW - BLOCKED_SECONDS + 1),
        replace(crashing(KEEPS_ENDING, Role.INFERENCE), status=STEPPED),
        replace(crashing(KEEPS_ENDING, Role.LEARNER), status=STEPPED, last_report=None),
        refused_credential(BLOCKED_SECONDS - 1),
        refused_credential(BLOCKED_SECONDS, memory=Memory()),
        refused_credential(BLOCKED_SECONDS, step=14),
        refused_credential(BLOCKED_SECONDS, labels={QUEUE_LABEL: "gpus"}),
        not_created(BLOCKED_SECONDS - 1, Role.TOOLS),
        not_created(BLOCKED_SECONDS),
        not_created(BLOCKED_SECONDS, Role.TOOLS, last_report=learner_report(report())),
        not_created(BLOCKED_SECONDS, *Role, last_report=None),
    ],
    ids=["soon", "the oldest", "in a queue", "it trains", "soon blocked", "blocked and trains", "soon denied",
         "denied after a step", "soon without agents", "another agent", "an agent lost in training",
         "an agent lost and resumed", "tools ended sometimes", "engines ended sometimes",
         "another engine", "an engine that loads again", "engines keep ending, soon", "engines lost and resumed",
         "the learner lost and resumed", "soon refused", "refused now", "refused after a step",
         "refused in a queue", "soon not created", "another engine is not created", "not created in training",
         "nothing is created"],
)  # fmt: skip
def test_others_keep_their_pods(held: Snapshot) -> None:
    assert not decide(held).parked


def test_a_refused_credential_is_timed_from_its_first_report() -> None:
    first = decide(refused_credential(0, memory=Memory()))
    assert (first.memory.refused, first.requeue_after) == (NOW, BLOCKED_SECONDS)
    later = replace(refused_credential(0, memory=first.memory), now=NOW + 60)
    assert (decide(later).memory.refused, decide(later).requeue_after) == (NOW, BLOCKED_SECONDS - 60)
    accepted = replace(later, last_report=learner_report(report(step=0)))
    assert decide(accepted).memory.refused is None


def test_a_job_that_trains_without_a_step_rests_longer_each_time() -> None:
    rest = rest_of(decide(without_agents(BLOCKED_SECONDS)))
    again = replace(without_agents(0), now=rest.until, memory=Memory(rest=rest))
    assert decide(again).memory.rest == rest, "that the learner gathers episodes is no step"
    late = replace(without_agents(0), now=NOW + BLOCKED_SECONDS, memory=Memory(rest=rest))
    assert rest_of(decide(late)).times == 2


def test_a_job_that_rests_for_a_credential_says_which() -> None:
    refusing = condition("LearnerProgressing", "False", "CredentialRefused", message=REFUSED)
    held = refused_credential(BLOCKED_SECONDS, status=status(refusing))
    written = status_of(held, decide(held))
    conditions = {item["type"]: item for item in written["conditions"]}
    assert conditions["LearnerProgressing"]["message"] == REFUSED
    assert REFUSED in conditions["Scheduled"]["message"]
    assert written["shown"]["phase"] == "WaitingFor"


def test_it_rests_until_its_time_and_longer_each_time() -> None:
    times = []
    memory, now = Memory(), NOW
    for _ in range(6):
        held = replace(blocked(BLOCKED_SECONDS + NOW - now), now=now, memory=memory)
        held = replace(held, pods=[replace(item, made=now - BLOCKED_SECONDS) for item in held.pods])
        memory = decide(held).memory
        assert memory.rest is not None
        times.append(memory.rest.until - now)
        resting = replace(held, pods=[], memory=memory, now=memory.rest.until - 1)
        assert decide(resting).parked
        again = replace(resting, now=memory.rest.until)
        decision = decide(again)
        assert (decision.stage, decision.parked) == (Stage.RUNNING, False)
        memory, now = decision.memory, again.now
    assert times == [60, 120, 240, 480, LONGEST_REST, LONGEST_REST]
    trained = replace(snapshot(), memory=memory, now=now)
    assert decide(trained).memory.rest is None, "the next time begins anew"


def test_another_spec_ends_the_rest() -> None:
    rest = rest_of(decide(blocked(BLOCKED_SECONDS)))
    resting = replace(snapshot(pods=[], last_report=None), memory=Memory(rest=rest))
    assert decide(resting).parked
    assert not decide(replace(resting, generation=resting.generation + 1)).parked


def test_a_deadline_of_the_job_counts_its_rests() -> None:
    rest = rest_of(decide(blocked(BLOCKED_SECONDS)))
    resting = replace(snapshot(pods=[], last_report=None, job=job("pendingDeadline=30s")), memory=Memory(rest=rest))
    assert decide(resting).requeue_after == 30
    late = decide(replace(resting, now=NOW + 30))
    assert late.ended is not None
    assert late.ended[0] == "PendingTooLong"
    assert "secret" in late.ended[1]


def test_a_resting_job_says_why_and_when_it_tries_again() -> None:
    held = blocked(BLOCKED_SECONDS, status=status(condition("Accepted", "False", "Unresolvable", message="no secret")))
    written = status_of(held, decide(held))
    conditions = {item["type"]: item for item in written["conditions"]}
    assert conditions["Scheduled"]["reason"] == "Parked"
    until = at(FIRST_REST)[11:19]
    assert f"tries again at {until} UTC" in conditions["Scheduled"]["message"]
    assert "s3" in conditions["Scheduled"]["message"]
    assert conditions["Accepted"]["message"] == "no secret", "as it was found"
    assert (conditions["Ready"]["status"], conditions["Stalled"]["status"]) == ("False", "False")
    assert written["shown"]["phase"] == "WaitingFor"
