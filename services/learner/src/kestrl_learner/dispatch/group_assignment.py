"""One group for a worker, and the request for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kestrl._shared.plan.settings.learner import EngineEntry, LearnerSettings
from kestrl._shared.rpc.codec import deadlines_to_proto
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.episode import PolicyVersion, Purpose, Scenario
from kestrl.episode.codec import policy_to_proto, scenario_to_proto
from kestrl_learner.engines.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssignment:
    """One group to run."""

    group_id: str
    scenario: Scenario
    size: int
    policy: PolicyVersion
    temperature: float
    seed: int
    purpose: Purpose
    top_p: float = 1.0
    """Below 1 only in evaluations."""
    top_k: int = 0
    """Above 0 only in evaluations."""
    max_turn_age: int = 0
    """Above 0 if newer versions sample the turns that begin later: steps by which the version of a running turn may be
    behind the newest."""


def engine_messages(engines: Sequence[EngineEntry]) -> list[pb.Engine]:
    """Names and addresses of engines."""
    return [pb.Engine(name=engine.name, url=engine.url) for engine in engines]


def run_group_request(assignment: GroupAssignment, settings: LearnerSettings, serving: Serving) -> pb.RunGroupRequest:
    """The request for a group.

    Args:
        assignment: The group.
        settings: The run's settings.
        serving: Engines of each version.
    """
    return pb.RunGroupRequest(
        group_id=assignment.group_id,
        scenario=scenario_to_proto(assignment.scenario),
        size=assignment.size,
        policy=policy_to_proto(assignment.policy),
        engines=engine_messages(serving.engines.get(assignment.policy, ())),
        engines_revision=serving.revision,
        sampling=pb.Sampling(
            temperature=assignment.temperature,
            top_p=assignment.top_p,
            top_k=assignment.top_k,
            max_tokens=settings.max_tokens,
            max_turns=settings.max_turns,
            max_tokens_per_turn=settings.max_tokens_per_turn,
        ),
        deadlines=deadlines_to_proto(settings.deadlines),
        seed=assignment.seed,
        purpose=assignment.purpose,
        continuation=_continuation(assignment.max_turn_age, serving),
    )


def _continuation(max_turn_age: int, serving: Serving) -> pb.Continuation | None:
    if not max_turn_age or serving.newest is None:
        return None
    return pb.Continuation(
        max_age=max_turn_age,
        newest=policy_to_proto(serving.newest),
        engines=engine_messages(serving.engines[serving.newest]),
    )
