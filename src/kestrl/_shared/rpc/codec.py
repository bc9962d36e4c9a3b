"""Conversion of states and reports between processes to protobuf messages and back."""

from __future__ import annotations

from collections.abc import Mapping

from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2
from kestrl.api.learner.v1 import learner_pb2
from kestrl.api.rollout.v1 import rollout_pb2
from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.runstate.states import EngineState, RunPhase, ServingState
from kestrl.tools import SandboxInUse

_PHASES: dict[RunPhase, learner_pb2.RunPhase.ValueType] = {
    member: learner_pb2.RunPhase.Value(f"RUN_PHASE_{member.name}") for member in RunPhase
}
_PHASES_BACK = {value: member for member, value in _PHASES.items()}
_SERVING: dict[ServingState, learner_pb2.ServingState.ValueType] = {
    member: learner_pb2.ServingState.Value(f"SERVING_STATE_{member.name}") for member in ServingState
}
_SERVING_BACK = {value: member for member, value in _SERVING.items()}
_ENGINES: dict[EngineState, inference_pb2.EngineState.ValueType] = {
    member: inference_pb2.EngineState.Value(f"ENGINE_STATE_{member.name}") for member in EngineState
}
_ENGINES_BACK = {value: member for member, value in _ENGINES.items()}


def sandboxes_to_proto(sandboxes: Mapping[str, SandboxInUse]) -> dict[str, pb.SandboxInUse]:
    return {
        name: pb.SandboxInUse(backend=sandbox.backend, isolation=sandbox.isolation)
        for name, sandbox in sandboxes.items()
    }


def sandboxes_from_proto(messages: Mapping[str, pb.SandboxInUse]) -> dict[str, SandboxInUse]:
    return {
        name: SandboxInUse(backend=message.backend, isolation=message.isolation) for name, message in messages.items()
    }


def deadlines_to_proto(deadlines: RolloutDeadlines) -> rollout_pb2.Deadlines:
    return rollout_pb2.Deadlines(**deadlines.model_dump(exclude={"step"}))


def deadlines_from_proto(message: rollout_pb2.Deadlines) -> RolloutDeadlines:
    return RolloutDeadlines(tool=message.tool, turn=message.turn, episode=message.episode, group=message.group)


def run_phase_to_proto(phase: RunPhase) -> learner_pb2.RunPhase.ValueType:
    return _PHASES[phase]


def run_phase_from_proto(value: learner_pb2.RunPhase.ValueType) -> RunPhase | None:
    """The phase, or None if it is not set or unknown to this version."""
    return _PHASES_BACK.get(value)


def serving_state_to_proto(state: ServingState) -> learner_pb2.ServingState.ValueType:
    return _SERVING[state]


def serving_state_from_proto(value: learner_pb2.ServingState.ValueType) -> ServingState | None:
    """The state, or None if it is not set or unknown to this version."""
    return _SERVING_BACK.get(value)


def engine_state_to_proto(state: EngineState) -> inference_pb2.EngineState.ValueType:
    return _ENGINES[state]


def engine_state_from_proto(value: inference_pb2.EngineState.ValueType) -> EngineState | None:
    """The state, or None if it is not set or unknown to this version."""
    return _ENGINES_BACK.get(value)
