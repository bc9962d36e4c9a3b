"""What a run survives: workers and engines that go and come back, stragglers, and being asked for too much."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.unit.learner.fakes import DECOUPLED, running, until

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.learner import EvaluateSettings, LearnerSettings
from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.api.learner.v1 import learner_pb2 as lpb
from kestrl.api.learner.v1 import learner_pb2_grpc as lstubs
from kestrl.errors import Boundary, EngineFailure, Failure, KestrlError, UserInputError
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.storage import open_store
from kestrl_learner import training
from kestrl_learner.__main__ import work
from kestrl_learner.dispatch import retry_pause
from kestrl_learner.dispatch.dispatcher import Dispatcher, StepDeadline
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.records import step_record

pytestmark = pytest.mark.usefixtures("quick")


def with_step_deadline(stage: Any, seconds: float, **changes: Any) -> LearnerSettings:
    deadlines = stage.settings.deadlines.model_copy(update={"step": seconds})
    return stage.but(validation=None, deadlines=deadlines, **changes)


async def test_a_worker_that_breaks_streams_for_a_while_costs_no_scenario(staged: Any) -> None:
    async with staged(workers=2) as stage:
        bad = stage.workers[1]
        count = 0

        def broken_for_a_while(request: Any, group: Any) -> Any:
            nonlocal count
            count += request.purpose == "train"
            return KestrlError("gone", code="unavailable", retryable=True) if 0 < count <= 2 else group

        bad.script = broken_for_a_while
        async with running(stage.but(max_failed_share=0.0)):
            pass
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["steps"] == 6


async def test_the_scenario_of_a_stored_group_is_that_of_the_data_set(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].script = lambda _, group: replace(
            group, scenario=replace(group.scenario, ground_truth="other")
        )
        async with running(stage.but(validation=None, max_steps=1)):
            pass
        groups = stage.groups(1)
        assert len(groups) == 2
        assert [group.scenario.ground_truth for group in groups] == [None, None]


async def test_a_draining_worker_gets_nothing_and_its_scenarios_go_elsewhere(staged: Any) -> None:
    async with staged(workers=2) as stage:
        stage.workers[1].draining = True
        async with running(stage.but(max_steps=2)):
            pass
        assert len(stage.workers[0].requests) > 0
        assert stage.workers[1].requests == []


async def test_a_worker_is_given_a_group_while_a_slot_is_free_and_none_beyond(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].concurrency = 4
        async with running(stage.but(max_steps=2)):
            pass
        # Two groups of three: the second has one slot and waits there for the others.
        assert stage.workers[0].most_running == 6


async def test_a_step_starts_without_a_late_group_and_the_group_is_retried(staged: Any) -> None:
    async with staged() as stage:
        hung = list[str]()

        def the_second(request: Any) -> bool:
            if len(stage.asked()) != 2:
                return False
            hung.append(request.scenario.id)
            return True

        stage.workers[0].hangs = the_second
        async with running(with_step_deadline(stage, 4.0, epochs=1)):
            pass
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {"infrastructure/step_deadline": 1}
        trained = [[group.scenario.id for group in stage.groups(step + 1)] for step in range(3)]
        assert [len(groups) for groups in trained] == [1, 2, 2]
        assert hung[0] in trained[1], "what was late is the next to be attempted"
        assert stage.workers[0].running == 0
        assert stage.states == {"trained": 5, "dropped": 1}, "what a short step leaves over is dropped at the end"


async def test_a_group_given_up_before_it_began_is_attempted_again(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Dispatcher._start_groups
    given_up = list[Any]()

    def started_too_late(self: Dispatcher, tasks: asyncio.TaskGroup) -> None:
        start(self, tasks)
        if not given_up and self._running.tasks():
            given_up.extend(self._running.tasks())
            self._running.end_late(given_up)

    monkeypatch.setattr(Dispatcher, "_start_groups", started_too_late)
    async with staged() as stage:
        async with running(with_step_deadline(stage, 20.0)):
            pass
        assert len(given_up) == 2
        assert not any(task.cancelled() for task in given_up)
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {"infrastructure/step_deadline": 2}
        assert stage.states == {"trained": 12}


async def test_a_step_for_which_nothing_comes_ends_the_run_with_a_reason(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].hangs = lambda request: request.purpose == "train" and len(stage.asked()) > 2
        with pytest.raises(StepDeadline, match=r"no group of step 2 was complete within 3 s; .*deadlines\.step"):
            async with running(with_step_deadline(stage, 3.0)):
                pass
        assert stage.summary["status"] == "failed"
        assert "step_deadline" in stage.summary["reason"]
        stage.workers[0].hangs = lambda _: False
        async with running(stage.but(validation=None)):
            pass
        assert (stage.summary["status"], stage.summary["steps"]) == ("succeeded", 6)


async def test_without_any_worker_the_run_fails_with_a_typed_reason(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].draining = True
        with pytest.raises(KestrlError) as caught:
            await LearnerRun(stage.but(start_seconds=0.5)).main()
        assert caught.value.code == "no_worker"
        assert stage.summary["status"] == "failed"


async def test_a_restarted_engine_is_used_only_after_it_verified_the_version(staged: Any) -> None:
    async with staged() as stage:
        worker, agent = stage.workers[0], stage.agents[1]
        worker.gate = asyncio.Event()
        async with running(stage.settings) as (run, _):
            await until(lambda: len(stage.asked()) == 2)
            agent.state = ipb.ENGINE_STATE_DOWN
            agent.held.clear()
            await until(lambda: run.progress.state.engines.verified == 1)
            worker.gate.set()
            await until(lambda: any(request.policy.step == 1 for request in stage.asked()))
            named = {engine.name for request in stage.asked() if request.policy.step == 1 for engine in request.engines}
            assert named == {"engine-0"}
            worker.gate.clear()
            agent.state = ipb.ENGINE_STATE_READY
            await until(lambda: run.progress.state.engines.verified == 2)
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        last = [request for request in stage.asked() if request.policy.step == 5]
        assert {engine.name for request in last for engine in request.engines} == {"engine-0", "engine-1"}


async def test_an_engine_that_was_killed_costs_a_scenario_one_attempt(staged: Any) -> None:
    """Its agent has not found out yet: it is asked to look before the engine is named again."""
    async with staged() as stage:
        lost = Failure(boundary=Boundary.ENGINE, code="connection_lost", message="reset by peer", retryable=True)
        dead, found = True, list[str]()

        def find(agent: Any) -> None:
            found.append(agent.name)
            agent.state = ipb.ENGINE_STATE_DOWN
            agent.held = {name: (policy, False) for name, (policy, _) in agent.held.items()}

        def ask(_: Any, group: Any) -> Any:
            if not dead:
                return group
            failed = [replace(episode, failure=lost, reward=None) for episode in group.episodes]
            return replace(group, episodes=failed)

        stage.workers[0].script = ask
        for agent in stage.agents:
            agent.found = partial(find, agent)
        async with running(stage.but(validation=None)):
            await until(lambda: len(found) == 2)
            await asyncio.sleep(3 * retry_pause.BACKOFF.first)  # that nothing happens has no event
            assert len(stage.asked()) == 2
            assert sorted(found) == ["engine-0", "engine-1"]
            dead = False
            for agent in stage.agents:
                agent.state = ipb.ENGINE_STATE_READY
                agent.held = {name: (policy, True) for name, (policy, _) in agent.held.items()}
        assert stage.summary["status"] == "succeeded"
        assert set(stage.summary["failures"]) == {"engine/connection_lost"}
        assert stage.states == {"trained": 12}


async def test_an_engine_that_failed_a_proof_is_tried_again_and_used(staged: Any) -> None:
    async with staged() as stage:
        failing = [True]
        stage.agents[1].fail = lambda policy: (
            EngineFailure("not now", code="engine_busy", retryable=True) if failing[0] and policy.step == 0 else None
        )
        stage.workers[0].gate = asyncio.Event()
        async with running(stage.but(max_steps=2)) as (run, _):
            await until(lambda: len(stage.asked()) == 2)
            assert run.progress.state.engines.verified == 1
            failing[0] = False
            await until(lambda: run.progress.state.engines.verified == 2)
            stage.workers[0].gate.set()
        assert stage.summary["failures"]["engine/engine_busy"] >= 1


async def test_a_straggler_too_old_to_be_trained_on_is_given_up_and_frees_its_slot(staged: Any) -> None:
    async with staged() as stage:
        worker = stage.workers[0]
        slow = asyncio.Event()
        first: list[str] = []
        inner = worker.RunGroup

        async def straggling(request: Any, context: Any) -> Any:
            if request.purpose == "train" and not first:
                first.append(request.group_id)
                await slow.wait()
            async for answer in inner(request, context):
                yield answer

        worker.RunGroup = straggling
        async with running(stage.but(algorithm={"max_staleness": 1, "correction": DECOUPLED})):
            pass
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["steps"] == 6
        assert all(agent.most_held <= 3 for agent in stage.agents)
        groups = [group for step in range(6) for group in stage.groups(step + 1)]
        assert first[0] not in {group.id for group in groups}
        assert len(groups) == 12
        # The scenario itself came back, and was trained on exactly once an epoch.
        ordinals = sorted(group.scenario.ordinal for group in groups)
        assert ordinals == sorted([*range(6), *range(6)])


async def test_every_retired_version_is_gone_from_every_engine(staged: Any) -> None:
    async with staged() as stage:
        async with running(stage.settings):
            pass
        for agent in stage.agents:
            assert {int(name.split(".")[1]) for name in agent.retired} >= set(range(5))
            assert all(policy.step >= 5 for policy, _ in agent.held.values())


async def test_a_changed_algorithm_does_not_resume_a_run(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        with pytest.raises(UserInputError, match="another model, algorithm or data"):
            await LearnerRun(stage.but(algorithm={"learning_rate": 0.5})).main()


async def test_data_that_fills_no_step_is_refused(staged: Any) -> None:
    async with staged() as stage:
        with pytest.raises(UserInputError, match="groupsPerStep"):
            await LearnerRun(stage.but(algorithm={"groups_per_step": 50})).main()


async def test_a_missing_model_is_an_input_error(staged: Any) -> None:
    async with staged() as stage:
        with pytest.raises(UserInputError, match="model"):
            await LearnerRun(stage.but(model="/nowhere/at/all")).main()


async def test_an_adapter_is_evaluated_without_training(staged: Any, tmp_path: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        trained = stage.summary
        stage.workers[0].requests.clear()
        other = tmp_path / "other"
        evaluate = EvaluateSettings(adapter=trained["policy"]["uri"])
        await LearnerRun(
            stage.but(evaluate=evaluate, storage=other.as_uri(), database=f"sqlite:///{other}/l.db")
        ).main()
        assert stage.asked() == []
        assert {request.policy.step for request in stage.asked("evaluation")} == {2}
        summary = stage.read("../other/summary.json")
        assert summary["after"]["reward"] == pytest.approx(trained["after"]["reward"])
        assert not (other / "adapters").exists()


async def test_samples_of_an_evaluation_have_seeds_of_their_own(staged: Any, tmp_path: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=1)).main()
        adapter = stage.summary["policy"]["uri"]
        seeds: dict[int, list[tuple[int, int]]] = {}
        for samples in (2, 3):
            stage.workers[0].requests.clear()
            other = tmp_path / f"other-{samples}"
            evaluation = EvaluationSampling(samples=samples, temperature=0.7, top_p=0.6, top_k=20)
            changes = {"evaluate": EvaluateSettings(adapter=adapter), "evaluation": evaluation}
            await LearnerRun(stage.but(**changes, storage=other.as_uri(), database=f"sqlite:///{other}/l.db")).main()
            asked = stage.asked("evaluation")
            used = {(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in asked}
            assert used == {(0.7, 0.6, 20)}
            assert len({request.group_id for request in asked}) == len(asked)
            seeds[samples] = sorted((request.seed, request.scenario.ordinal) for request in asked)
            summary = stage.read(f"../other-{samples}/summary.json")
            assert EvaluationSampling(**summary["sampling"]) == evaluation
            after = summary["after"]
            assert after["episodes"] == len(asked)
            assert {f"best@{samples}"} <= set(after)
        assert len(dict(seeds[3])) == len(seeds[3]), "every episode has a seed of its own"
        assert set(seeds[2]) < set(seeds[3]), "more samples repeat the first ones"


async def test_evaluations_of_training_sample_as_the_job_says(staged: Any) -> None:
    async with staged() as stage:
        evaluation = EvaluationSampling(samples=2, temperature=stage.settings.temperature, top_p=0.6)
        await LearnerRun(stage.but(max_steps=1, evaluation=evaluation)).main()
        assert {(request.sampling.top_p, request.sampling.top_k) for request in stage.asked()} == {(1.0, 0)}
        asked = stage.asked("evaluation")
        assert {request.sampling.top_p for request in asked} == {0.6, 1.0}, "and as in training, for sampled_reward"
        assert len({request.group_id for request in asked}) == len(asked)
        for side in ("before", "after"):
            assert {"best@2", "sampled_reward"} <= set(stage.summary[side])
        assert stage.summary["sampling"]["top_p"] == 0.6


async def test_the_service_publishes_progress_and_drains(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        serving = asyncio.create_task(work(stage.settings))
        seen: list[lpb.WatchProgressResponse] = []
        async with rpc.channel(stage.settings.listen) as connection:
            stub: Any = lstubs.LearnerServiceStub(connection)
            await until(lambda: len(stage.asked()) == 2)
            request = lpb.WatchProgressRequest()
            async for report in rpc.stream(
                stub.WatchProgress,
                request,
                lpb.WatchProgressResponse,
                timeout=40,
                peer="learner",
                token=Secret.CONTROLLER_TO_LEARNER.here(),
            ):
                if not seen:
                    await rpc.call(
                        stub.Drain,
                        lpb.DrainRequest(),
                        lpb.DrainResponse,
                        timeout=20,
                        peer="learner",
                        token=Secret.CONTROLLER_TO_LEARNER.here(),
                    )
                seen.append(report)
        async with asyncio.timeout(20):
            await serving
        assert seen[0].phase == lpb.RUN_PHASE_TRAINING
        assert seen[0].engines_converged == 2
        assert seen[0].groups_running == 2
        assert seen[-1].phase == lpb.RUN_PHASE_SUSPENDED
        assert stage.summary["status"] == "suspended"


async def test_a_run_whose_ledger_is_gone_is_not_trained_on_anew(staged: Any, tmp_path: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        other = {"database": f"sqlite:///{tmp_path}/another.db"}
        with pytest.raises(UserInputError, match="a run at step 2, and its ledger is not here"):
            await LearnerRun(stage.but(max_steps=4, **other)).main()
        await LearnerRun(stage.but(max_steps=4)).main()
        assert stage.summary["steps"] == 4


async def test_whatever_ends_a_run_what_it_learned_is_kept(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: int, *arguments: Any) -> Any:
        if step == 2:
            raise ZeroDivisionError("a bug")
        return step_record(step, *arguments)

    async with staged() as stage:
        monkeypatch.setattr(training, "step_record", broken)
        with pytest.raises(ZeroDivisionError):
            await LearnerRun(stage.but(max_steps=4)).main()
        assert stage.summary["status"] == "failed"
        assert "[infrastructure/internal] ZeroDivisionError: a bug" in stage.summary["reason"]
        assert [
            path
            for path in open_store(stage.settings.storage).list("checkpoints")
            if path.endswith("000002/manifest.json")
        ]
        monkeypatch.undo()
        await LearnerRun(stage.but(max_steps=4)).main()
        assert (stage.summary["status"], stage.summary["steps"]) == ("succeeded", 4)


async def test_a_ledger_beside_an_empty_storage_is_refused(staged: Any, tmp_path: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        with pytest.raises(UserInputError, match=r"the ledger holds a run at step 2, but .* holds nothing of it"):
            await LearnerRun(stage.but(max_steps=4, storage=(tmp_path / "empty").as_uri())).main()
        await LearnerRun(stage.but(max_steps=4)).main()
        assert stage.summary["steps"] == 4


async def test_engines_that_can_never_start_end_the_run_at_once(staged: Any) -> None:
    async with staged() as stage:
        for agent in stage.agents:
            agent.state = ipb.ENGINE_STATE_STARTING
            agent.failure = Failure(
                boundary=Boundary.ENGINE, code="engine_cannot_start", message="ValueError: the root cause"
            )
        async with asyncio.timeout(20):
            with pytest.raises(KestrlError, match=r"retrying cannot help .*ValueError: the root cause") as caught:
                await LearnerRun(stage.but(start_seconds=600.0)).main()
        assert caught.value.code == "no_engine_proved"
