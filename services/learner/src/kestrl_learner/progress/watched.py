"""What a watcher of a run is sent at once, as opposed to numbers, which can wait. Pure."""

from __future__ import annotations

from kestrl.runstate.gathering import Gathering
from kestrl.runstate.history import History, LastStep, Stale
from kestrl.runstate.state import Gauges, RunState, StoreAccess
from kestrl.runstate.states import ServingState


def is_news(sent_state: RunState, state: RunState) -> bool:
    """Whether a watcher that was sent one state should know the other at once. That engines load the version of a step
    is no news; that they have loaded it is, to a watcher that was sent that they load it.
    """
    return standing(sent_state) not in (standing(state), standing(_updated(state)))


def _updated(state: RunState) -> RunState:
    """The state once engines have loaded the version that they are loading after a step."""
    if not state.engines.updating:
        return state
    reports = tuple(report.but(state=ServingState.SERVING) for report in state.engines.reports)
    return state.but(engines=state.engines.but(verified=state.engines.total, reports=reports))


def standing(state: RunState) -> RunState:
    """The state without what changes while a run goes on as it should, so that two of them differ if a watcher should
    know at once: whether there is a version, a checkpoint, a mean reward and a worker stays, as do the kinds of
    failures and the engines' states. A fact that is not named here is sent at once.
    """
    activity, steps, policy, engines = state.activity, state.steps, state.policy, state.engines
    return state.but(
        number=0,
        activity=activity.but(message=""),
        steps=steps.but(done=min(1, steps.done), equal_rewards=int(steps.degenerate)),
        policy=policy.but(
            version=None, uri="published" if policy.version else "", parent="", seconds=0.0, probe_distance=None
        ),
        verified=state.verified.but(version=None, uri=""),
        engines=engines.but(
            verified=int(engines.verified >= engines.total),
            reports=tuple(report.but(policy=None, lag=int(report.policy is None)) for report in engines.reports),
        ),
        means={"reward": float("reward" in state.means), "tool_calls": float(bool(state.means.get("tool_calls")))},
        gathering=Gathering(),
        stale_in_step=Stale(),
        last_step=LastStep(),
        learning=state.learning.but(message="", warning=str(bool(state.learning.warning))),
        tools=state.tools.but(warning=""),
        storage=StoreAccess(
            checkpoint=0 if state.storage.checkpoint is not None else None,
            failure=state.storage.failure,
            wait=state.storage.wait,
        ),
        history=History(failures=dict.fromkeys(state.history.failures, 1)),
        gauges=Gauges(workers=min(1, state.gauges.workers)),
    )
