"""The builds of engines that a run names."""

from __future__ import annotations

from kestrl.runstate.events import EnginesObserved, ObservationsEnded
from kestrl.runstate.state import BUILDS, EngineBuild, EngineReport, RunState

VLLM = EngineBuild(engine="vllm", version="0.32.0", witness="engine")
SGLANG = EngineBuild(engine="sglang", version="0.5.23", witness="guard")


def observed(*builds: EngineBuild | None) -> EnginesObserved:
    reports = tuple(EngineReport(name=f"engine-{number}", build=build) for number, build in enumerate(builds))
    return EnginesObserved(verified=len(builds), reports=reports)


def test_a_run_names_every_build_that_answered_once_also_after_its_end() -> None:
    state = RunState()
    for event in (observed(None, None), observed(VLLM, None), observed(VLLM, SGLANG), ObservationsEnded()):
        state = event.after(state)
    assert state.engines.builds == (VLLM, SGLANG)
    assert state.engines.reports == ()
    assert RunState.from_json(state.to_json(), "here").engines.builds == (VLLM, SGLANG)


def test_the_builds_of_a_run_are_bounded() -> None:
    many = [EngineBuild(engine="vllm", version=f"0.{number}") for number in range(3 * BUILDS)]
    assert observed(*many).after(RunState()).engines.builds == tuple(many[:BUILDS])
