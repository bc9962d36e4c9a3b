"""The state of a run in the learner's stream.

The field `state` has all of it. The other fields say parts of it again for an operator of an earlier version, and are
read from a learner of an earlier version, which sends no `state`; a new fact is not added to them.
"""

from __future__ import annotations

import json

from kestrl._shared.rpc.codec import (
    run_phase_from_proto,
    run_phase_to_proto,
    sandboxes_from_proto,
    sandboxes_to_proto,
    serving_state_from_proto,
    serving_state_to_proto,
)
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode.codec import failure_from_proto, failure_to_proto, policy_from_proto, policy_to_proto
from kestrl.errors import KestrlError, UserInputError
from kestrl.runstate.gathering import Gathering
from kestrl.runstate.history import History, LastStep
from kestrl.runstate.state import (
    WINDOW_STEPS,
    Activity,
    EngineFleet,
    EngineReport,
    Gauges,
    Learning,
    NewestPolicy,
    RunState,
    Steps,
    StoreAccess,
    ToolUse,
)
from kestrl.runstate.states import RunPhase, ServingState

EVALUATIONS = 16
"""Last evaluations in a report: it is sent at every change, and a run may have thousands of them."""

LONGEST_NUMBER = 20
"""Characters of the longest integer of 64 bits."""


class MalformedReport(KestrlError):
    """A learner sent a state that is none."""

    code = "malformed_report"


def report_of(state: RunState) -> pb.WatchProgressResponse:
    """A report for the stream."""
    activity, policy, engines, history = state.activity, state.policy, state.engines, state.history
    last = dict(sorted(history.evaluations.items())[-EVALUATIONS:])
    bounded = state.but(history=history.but(evaluations=last))
    return pb.WatchProgressResponse(
        state=json.dumps(bounded.to_json()),
        phase=run_phase_to_proto(activity.phase or RunPhase.STARTING),
        step=state.steps.done,
        total_steps=state.steps.total,
        means=state.means,
        policy=policy_to_proto(policy.version),
        engines_converged=engines.verified,
        engines_total=engines.total,
        tokens_per_second=state.last_step.tokens_per_second,
        eta_seconds=state.last_step.eta_seconds,
        failures=history.failures,
        skipped_rows=history.skipped_rows,
        failure=None if activity.failure is None else failure_to_proto(activity.failure),
        message=activity.message,
        groups_running=state.gauges.groups_running,
        engines=map(_engine_to_proto, engines.reports),
        checkpoint_step=state.storage.checkpoint,
        policy_uri=policy.uri,
        policy_parent=policy.parent,
        episodes_per_second=state.last_step.episodes_per_second,
        workers=state.gauges.workers,
        groups_ready=state.gauges.groups_ready,
        degenerate=state.steps.degenerate,
        storage_failure=state.storage.failure,
        storage_wait=state.storage.wait,
        learned=state.learning.learned,
        not_learned_reason=state.learning.reason,
        not_learned=state.learning.message,
        learning_warning=state.learning.warning,
        gathering=_gathering_to_proto(state.gathering),
        tool_warning_reason=state.tools.warning_reason,
        tool_warning=state.tools.warning,
        sandboxes=sandboxes_to_proto(state.tools.sandboxes),
    )


def state_of(report: pb.WatchProgressResponse) -> RunState:
    """The state in a report, of a learner of any version.

    Raises:
        MalformedReport: It is none.
    """
    if not report.state:
        return _earlier_state(report)
    try:
        content = json.loads(report.state, parse_int=_bounded)
        json.dumps(content, ensure_ascii=False).encode()  # escapes may stand for what no text can hold
        return RunState.from_json(content, "the learner's report")
    except UserInputError:  # of a later version: what earlier versions read is there, too
        return _earlier_state(report)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedReport(f"the learner's report is malformed: {str(error)[:500]}") from error


def _bounded(digits: str) -> int:
    """An integer that other protocols can carry on."""
    if len(digits) > LONGEST_NUMBER or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:LONGEST_NUMBER]} is beyond 64 bits")
    return int(digits)


def _earlier_state(report: pb.WatchProgressResponse) -> RunState:
    return RunState(
        activity=Activity(
            phase=run_phase_from_proto(report.phase),
            message=report.message,
            failure=failure_from_proto(report.failure) if report.HasField("failure") else None,
        ),
        steps=Steps(done=report.step, total=report.total_steps, equal_rewards=WINDOW_STEPS if report.degenerate else 0),
        policy=NewestPolicy(
            version=policy_from_proto(report.policy), uri=report.policy_uri, parent=report.policy_parent
        ),
        engines=EngineFleet(
            total=report.engines_total,
            verified=report.engines_converged,
            reports=tuple(map(_engine_from_proto, report.engines)),
        ),
        means=dict(report.means),
        gathering=_gathering_from_proto(report.gathering),
        last_step=LastStep(
            tokens_per_second=report.tokens_per_second,
            episodes_per_second=report.episodes_per_second,
            eta_seconds=report.eta_seconds,
        ),
        learning=Learning(
            learned=report.learned if report.HasField("learned") else None,
            reason=report.not_learned_reason,
            message=report.not_learned,
            warning=report.learning_warning,
        ),
        tools=ToolUse(
            warning_reason=report.tool_warning_reason,
            warning=report.tool_warning,
            sandboxes=sandboxes_from_proto(report.sandboxes),
        ),
        storage=StoreAccess(
            checkpoint=report.checkpoint_step if report.HasField("checkpoint_step") else None,
            failure=report.storage_failure,
            wait=report.storage_wait,
        ),
        history=History(failures=dict(report.failures), skipped_rows=report.skipped_rows),
        gauges=Gauges(groups_running=report.groups_running, groups_ready=report.groups_ready, workers=report.workers),
    )


def _engine_to_proto(engine: EngineReport) -> pb.EngineProgress:
    return pb.EngineProgress(
        name=engine.name,
        policy=policy_to_proto(engine.policy),
        lag=engine.lag,
        state=serving_state_to_proto(engine.state or ServingState.STARTING),
        message=engine.message,
    )


def _engine_from_proto(engine: pb.EngineProgress) -> EngineReport:
    return EngineReport(
        name=engine.name,
        policy=policy_from_proto(engine.policy),
        lag=engine.lag,
        state=serving_state_from_proto(engine.state),
        message=engine.message,
    )


def _gathering_to_proto(gathering: Gathering) -> pb.Gathering:
    return pb.Gathering(
        wanted=gathering.wanted,
        groups=gathering.groups,
        episodes=gathering.episodes,
        tokens=gathering.tokens,
        seconds=gathering.seconds,
        sums=gathering.sums,
        divisors=gathering.divisors,
        failures=gathering.failures,
    )


def _gathering_from_proto(message: pb.Gathering) -> Gathering:
    return Gathering(
        wanted=message.wanted,
        groups=message.groups,
        episodes=message.episodes,
        tokens=message.tokens,
        seconds=message.seconds,
        sums=dict(message.sums),
        divisors=dict(message.divisors),
        failures=dict(message.failures),
    )
