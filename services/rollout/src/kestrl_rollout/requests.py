"""Validation and decoding of `RunGroupRequest`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kestrl._shared.rpc.codec import deadlines_from_proto
from kestrl.agents import Limits
from kestrl.api.common.v1 import common_pb2 as common
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.episode import BASE_MODEL_NAME, PolicyVersion, Purpose, Scenario
from kestrl.episode.codec import policy_from_proto, scenario_from_proto
from kestrl.episode.deadlines import NESTING, RolloutDeadlines, overlaps
from kestrl.errors import UserInputError
from kestrl_rollout.engine.client import EngineAddress
from kestrl_rollout.engine.engine_set import Continuation

ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group to run."""

    id: str
    scenario: Scenario
    encoded_scenario: common.Scenario
    """The scenario as the learner sent it, for the judge and for the learner's group."""
    size: int
    policy: PolicyVersion | None
    engines: tuple[EngineAddress, ...]
    engines_revision: int = 0
    """Grows with every change of engines."""
    continuation: Continuation | None = None
    """The newest version, if it may sample turns that begin later; None if every completion is of `policy`."""
    limits: Limits
    deadlines: RolloutDeadlines
    seed: int

    @property
    def policy_name(self) -> str:
        """Name under which the engines serve the policy."""
        return BASE_MODEL_NAME if self.policy is None else self.policy.name


def _refuse(field: str, reason: str) -> UserInputError:
    return UserInputError(f"RunGroup: {field}: {reason}", code="invalid_request")


def _check_sampling(sampling: pb.Sampling, purpose: str) -> None:
    if not 0 <= sampling.temperature < float("inf"):
        raise _refuse("sampling.temperature", "is negative or not finite")
    if not 0 <= sampling.top_p <= 1:
        raise _refuse("sampling.top_p", "is not between 0 and 1")
    if sampling.top_k < 0:
        raise _refuse("sampling.top_k", "is negative")
    if purpose != Purpose.EVALUATION and (0 < sampling.top_p < 1 or sampling.top_k):
        raise _refuse(
            "sampling",
            "top_p and top_k are for evaluations: in training the learner computes log-probs over all tokens",
        )
    if sampling.max_tokens < 1 or sampling.max_turns < 1 or sampling.max_tokens_per_turn < 0:
        raise _refuse("sampling", "max_tokens and max_turns must be at least 1, max_tokens_per_turn at least 0")


def addresses(engines: Iterable[pb.Engine]) -> tuple[EngineAddress, ...]:
    """The addresses of engines."""
    return tuple(EngineAddress(name=engine.name, url=engine.url) for engine in engines)


def _continuation(message: pb.RunGroupRequest) -> Continuation | None:
    if not message.HasField("continuation"):
        return None
    version, policy = policy_from_proto(message.continuation.newest), policy_from_proto(message.policy)
    if version is None or policy is None or version.step < policy.step:
        raise _refuse("continuation.newest", "is not a version, or older than policy")
    if message.continuation.max_age < 1:
        raise _refuse("continuation.max_age", "is below 1")
    if message.purpose != Purpose.TRAIN:
        raise _refuse("continuation", "is for training: an evaluation is of one version")
    return Continuation(
        newest=version, engines=addresses(message.continuation.engines), max_age=message.continuation.max_age
    )


def read_request(message: pb.RunGroupRequest, *, context_length: int) -> GroupRequest:
    """Validates and decodes a request.

    Raises:
        UserInputError: With code `invalid_request` and the field at fault.
    """
    sampling, deadlines = message.sampling, deadlines_from_proto(message.deadlines)
    scenario = scenario_from_proto(message.scenario)
    if not message.group_id:
        raise _refuse("group_id", "is empty")
    if message.size < 1:
        raise _refuse("size", "is below 1")
    if not message.engines:
        raise _refuse("engines", "is empty: no engine has verified the policy")
    if len({engine.name for engine in message.engines}) != len(message.engines):
        raise _refuse("engines", "names one engine twice")
    _check_sampling(sampling, message.purpose)
    if deadlines.tool <= 0:
        raise _refuse("deadlines.tool", f"is {deadlines.tool:g}, not above 0")
    for inside, short, outside, long in overlaps(**dict(deadlines)):
        raise _refuse(f"deadlines.{outside}", f"{long:g} s does not leave room for {inside} ({short:g} s); {NESTING}")
    for index, prompt_message in enumerate(scenario.messages):
        if prompt_message["role"] not in ROLES:
            raise _refuse(
                f"scenario.messages[{index}].role", f"is {prompt_message['role']!r}, not one of {sorted(ROLES)}"
            )
    return GroupRequest(
        id=message.group_id,
        scenario=scenario,
        encoded_scenario=message.scenario,
        size=message.size,
        policy=policy_from_proto(message.policy),
        engines=addresses(message.engines),
        engines_revision=message.engines_revision,
        continuation=_continuation(message),
        limits=Limits(
            max_turns=sampling.max_turns,
            max_tokens=sampling.max_tokens,
            max_tokens_per_turn=sampling.max_tokens_per_turn,
            context_length=context_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k,
        ),
        deadlines=deadlines,
        seed=message.seed,
    )
