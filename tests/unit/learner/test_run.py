"""Whole runs of the learner against fake engines and workers over real gRPC."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.learner.fakes import DECOUPLED, make_policy, until

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.spec.algorithms import PRESETS
from kestrl.episode import UNSCORED, CallOutcome, Group, Purpose, StopReason, ToolCall
from kestrl.errors import Boundary, EngineFailure, Failure, KestrlError, UserInputError
from kestrl.runstate.events import ActivityNoted
from kestrl.runstate.stored import read_events
from kestrl.storage import open_store
from kestrl.storage.episodes import GroupOutcome, ObjectEpisodeStore, StoredGroup
from kestrl.storage.files import digest
from kestrl_learner.dispatch import retry_pause
from kestrl_learner.dispatch.acceptance import MAX_ATTEMPTS
from kestrl_learner.dispatch.dispatcher import Dispatcher
from kestrl_learner.dispatch.evaluate import ATTEMPTS
from kestrl_learner.model import adapters
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import checkpoint
from kestrl_learner.training import TrainingRun


async def train(settings: Any) -> LearnerRun:
    run = LearnerRun(settings)
    async with asyncio.timeout(30):
        await run.main()
    return run


async def test_a_synchronous_run_trains_every_scenario_of_every_epoch_once(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.settings)
        summary = stage.summary
        assert summary["status"] == "succeeded"
        assert summary["steps"] == 6
        assert stage.states == {"trained": 12}
        assert len(stage.asked()) == 12
        assert summary["logprob_gap"]["worst"] <= 1e-4
        assert summary["failures"] == {}
        for side in ("before", "after"):
            assert {"reward", "answer_correct", "num_turns", "duration", "exceptions", "sampled_reward"} <= set(
                summary[side]
            )
        assert summary["before"]["exceptions"] == 0
        assert summary["policy"]["sha256"][:12] in summary["policy"]["uri"]


async def test_a_run_starts_from_a_published_adapter(staged: Any, tmp_path: Path) -> None:
    async with staged() as stage:
        policy = make_policy(Path(stage.settings.model), rank=stage.settings.rank, disturb=0.3)
        sft = open_store((tmp_path / "sft").as_uri())
        manifest, address = adapters.publish(sft, policy, job="warm-up", step=4, base=stage.settings.model, parent=None)
        await train(stage.but(adapter_from=address, max_steps=1, validation=None))
        assert digest(stage.adapter_bytes(0)) == manifest.sha256
        assert digest(stage.adapter_bytes(1)) != manifest.sha256
        assert stage.summary["logprob_gap"]["worst"] <= 1e-4


async def test_without_staleness_groups_sample_from_their_steps_first_version(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.settings)
        steps = [request.policy.step for request in stage.asked()]
        assert steps == sorted(steps)
        assert {step: steps.count(step) for step in steps} == dict.fromkeys(range(6), 2)
        assert all(agent.most_held <= 2 for agent in stage.agents)


async def test_each_step_keeps_what_came_in_of_its_rollouts(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.settings)
        for step in range(1, 7):
            record = stage.read(f"metrics/{step:06d}.json")
            gathered = record["gathered"]
            reward = gathered["metrics"]["reward"]
            assert gathered["groups"] == gathered["wanted"] == 2
            assert reward["divisor"] == gathered["episodes"] == record["episodes"]
            assert reward["sum"] / reward["divisor"] == pytest.approx(record["reward"])
            assert gathered["tokens"] > 0
            assert gathered["failures"] == {}


async def test_with_staleness_rollouts_overlap_training_within_the_bound(staged: Any) -> None:
    async with staged() as stage:
        settings = stage.but(algorithm={"max_staleness": 1, "correction": DECOUPLED})
        await train(settings)
        assert stage.summary["status"] == "succeeded"
        assert stage.states == {"trained": 12}
        staleness = [stage.read(f"metrics/{step:06d}.json")["staleness"] for step in range(1, 7)]
        assert max(staleness) == 1
        gaps = [stage.read(f"metrics/{step:06d}.json")["gap"] for step in range(1, 7)]
        # To the newest policy an older one's tokens differ by what was learned, to their own they do not: of each step
        # some are compared.
        assert stage.summary["logprob_gap"]["tokens"] == sum(gap["own"]["tokens"] for gap in gaps)
        assert all(gap["own"]["tokens"] and gap["own"]["max"] <= 1e-4 for gap in gaps)
        assert max(gap["max"] for gap in gaps) > 1e-4
        assert all(agent.most_held <= 3 for agent in stage.agents)


async def test_a_resumed_run_ends_with_the_very_bytes_of_an_uninterrupted_one(staged: Any, tmp_path: Any) -> None:
    async with staged() as stage:
        whole = tmp_path / "whole"
        whole.mkdir()
        other = {"storage": (whole / "store").as_uri(), "database": f"sqlite:///{whole}/ledger.db"}
        await train(stage.but(max_steps=4, **other))
        expected = {path.name for path in (whole / "store" / "adapters").iterdir()}

        await train(stage.but(max_steps=2))
        assert stage.summary["steps"] == 2
        await train(stage.but(max_steps=4))
        assert stage.summary["steps"] == 4
        assert {path.name for path in (tmp_path / "store" / "adapters").iterdir()} == expected
        assert stage.states["trained"] == 8


async def test_evaluations_between_are_kept_over_a_resume(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.but(max_steps=3, eval_every=2))
        await train(stage.but(max_steps=6, eval_every=2))
        evaluations = stage.summary["evaluations"]
        assert [item["step"] for item in evaluations] == [0, 2, 4, 6]
        assert evaluations[0]["reward"] == stage.summary["before"]["reward"]
        assert evaluations[-1]["reward"] == stage.summary["after"]["reward"]
        assert stage.read("metrics/eval/000004.json") == evaluations[2]
        step = stage.read("metrics/000004.json")
        assert {"reward", "num_turns", "duration"} <= step.keys()


async def test_what_training_computed_is_stored_with_the_tokens(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.but(max_steps=1))
        for each in stage.stored(1):
            assert each.tokens.keys() == {episode.id for episode in each.group.episodes}
            rewards = [episode.reward for episode in each.group.episodes]
            means = [sum(each.tokens[episode.id].advantages) for episode in each.group.episodes]
            assert sorted(range(3), key=rewards.__getitem__) == sorted(range(3), key=means.__getitem__)
            for episode in each.group.episodes:
                behaviour = [
                    value for row in episode.rows for value, on in zip(row.logprobs, row.mask, strict=True) if on
                ]
                assert list(each.tokens[episode.id].learner_logprobs) == pytest.approx(behaviour, abs=2e-4)


async def test_a_resume_repeats_what_was_dropped_after_its_checkpoint(staged: Any) -> None:
    """Its record was in a file that the resumed run writes anew."""
    async with staged() as stage:
        failure = Failure(boundary=Boundary.TOOL, code="tool_raised", message="a bug")

        def break_one(request: Any, group: Any) -> Any:
            if request.purpose == "train" and request.scenario.ordinal == 3:
                broken = [replace(episode, failure=failure, reward=None) for episode in group.episodes]
                return replace(group, episodes=broken)
            return group

        stage.workers[0].script = break_one
        await train(stage.but(epochs=1, max_steps=2, checkpoint_every=10))
        dropped = [each for step in (1, 2) for each in stage.stored(step) if each.outcome is GroupOutcome.DROPPED]
        for manifest in (stage.folder / "store" / "checkpoints").glob("*/manifest.json"):
            manifest.unlink()
        stage.workers[0].script = lambda request, group: group
        await train(stage.but(epochs=1, max_steps=3, checkpoint_every=10))
        again = {each.group.scenario.ordinal: each for step in (1, 2, 3) for each in stage.stored(step)}
        assert [each.group.scenario.ordinal for each in dropped] in ([], [3])
        assert {each.outcome for each in again.values()} == {GroupOutcome.TRAINED}
        assert again.keys() == set(range(6))


def all_stored(stage: Any) -> list[StoredGroup]:
    """The groups of all training files; those that no step was left to take are where the next step would be."""
    episodes = ObjectEpisodeStore(open_store(str(stage.folder / "store")))
    return [each for step in episodes.steps(Purpose.TRAIN) for each in episodes.read(Purpose.TRAIN, step).stored]


async def test_episodes_of_every_step_are_stored_whole(staged: Any) -> None:
    async with staged() as stage:
        await train(stage.but(max_steps=2))
        groups = [group for step in (1, 2) for group in stage.groups(step)]
        assert len(groups) == 4
        assert all(len(group.episodes) == 3 for group in groups)
        assert len({group.scenario.id for group in groups}) == 4
        assert [group.scenario.ordinal for group in stage.groups(2, Purpose.EVALUATION)] == [0, 1, 2]


async def test_a_group_with_a_permanent_failure_is_dropped_with_its_reason(staged: Any) -> None:
    async with staged() as stage:

        def break_one(request: Any, group: Any) -> Any:
            if request.purpose == "train" and request.scenario.ordinal == 3:
                failure = Failure(boundary=Boundary.TOOL, code="tool_raised", message="a bug")
                broken = replace(group.episodes[1], failure=failure, reward=None, stop_reason=StopReason.FAILED)
                return replace(group, episodes=[group.episodes[0], broken, group.episodes[2]])
            return group

        stage.workers[0].script = break_one
        await train(stage.settings)
        assert stage.states == {"trained": 10, "dropped": 2}
        assert stage.summary["failures"] == {"tool/tool_raised": 2}
        assert stage.summary["steps"] == 5
        stored = all_stored(stage)
        assert Counter(each.outcome for each in stored) == {GroupOutcome.TRAINED: 10, GroupOutcome.DROPPED: 2}
        dropped = [each for each in stored if each.outcome is GroupOutcome.DROPPED]
        assert {each.reason for each in dropped} == {"tool/tool_raised: a bug"}
        assert [len(each.group.episodes) for each in dropped] == [3, 3], "with the episodes that did not fail"


async def test_a_group_shrinks_where_the_job_says_so(staged: Any) -> None:
    async with staged() as stage:

        def break_one(request: Any, group: Any) -> Any:
            if request.purpose == "train":
                failure = Failure(boundary=Boundary.JUDGE, code="reward_raised", message="a bug")
                return replace(
                    group, episodes=[*group.episodes[:2], replace(group.episodes[2], failure=failure, reward=None)]
                )
            return group

        stage.workers[0].script = break_one
        await train(stage.but(max_steps=2, algorithm={"on_failed_episode": "shrink"}))
        assert [len(group.episodes) for group in stage.groups(1)] == [2, 2]
        stored = stage.stored(1)
        assert [(each.outcome, len(each.group.episodes)) for each in stored] == [(GroupOutcome.SHRUNK, 3)] * 2
        assert [each.group.episodes[2].failure.code for each in stored] == ["reward_raised"] * 2


async def test_a_broken_stream_is_attempted_again_with_the_same_seed(staged: Any) -> None:
    async with staged() as stage:
        broken: set[str] = set()

        def break_once(request: Any, group: Any) -> Any:
            if request.purpose == "train" and request.scenario.id not in broken and request.scenario.ordinal < 2:
                broken.add(request.scenario.id)
                return None
            return group

        stage.workers[0].script = break_once
        await train(stage.but(epochs=1, max_failed_share=0.0))
        assert stage.states == {"trained": 6}
        seeds: dict[str, set[int]] = {}
        ids: list[str] = []
        for request in stage.asked():
            seeds.setdefault(request.scenario.id, set()).add(request.seed)
            ids.append(request.group_id)
        assert len(ids) == 8
        assert len(set(ids)) == 8
        assert all(len(found) == 1 for found in seeds.values())
        stored = all_stored(stage)
        retried = [each for each in stored if each.outcome is GroupOutcome.RETRIED]
        assert [(each.attempt, each.group.episodes, bool(each.failure)) for each in retried] == [(0, [], True)] * 2
        assert {each.attempt for each in stored if each.group.scenario.ordinal < 2 and each not in retried} == {1}


@pytest.mark.parametrize(
    ("boundary", "code"),
    [
        (Boundary.TOOL, "tool_unauthorized"),
        (Boundary.SANDBOX, "sandbox_unauthorized"),
        (Boundary.JUDGE, "judge_unauthorized"),
    ],
)
async def test_a_refused_credential_of_a_tool_is_waited_for_and_costs_no_scenario(
    staged: Any, monkeypatch: pytest.MonkeyPatch, boundary: Boundary, code: str
) -> None:
    monkeypatch.setattr(retry_pause, "BACKOFF", Backoff(0.001, 0.001))
    failure = Failure(boundary=boundary, code=code, message="crm: 401", component="tools", retryable=True)
    call = ToolCall(turn=0, name="search", raw="{}", arguments={}, outcome=CallOutcome.OK, text="found")
    async with staged() as stage:
        refusals: list[str] = []

        def refuse(request: Any, group: Any) -> Any:
            if request.purpose != "train":
                return group
            if len(refusals) < 6 * (MAX_ATTEMPTS + 1):
                refusals.append(request.scenario.id)
                broken = replace(group.episodes[0], failure=failure, reward=None, stop_reason=StopReason.FAILED)
                return replace(group, episodes=[broken, *group.episodes[1:]])
            return replace(group, episodes=[replace(episode, tool_calls=[call]) for episode in group.episodes])

        stage.workers[0].script = refuse
        run = LearnerRun(stage.but(epochs=1, max_failed_share=0.0))
        ends = asyncio.create_task(run.main())
        try:
            await until(lambda: run.progress.state.tools.wait, 20)
            assert run.progress.state.tools.wait.startswith("crm: 401; since ")
        finally:
            await ends
        assert not run.progress.state.tools.wait
        assert stage.states == {"trained": 6}
        assert stage.summary["failures"] == {f"{boundary}/{code}": len(refusals)}


async def test_an_evaluation_waits_for_a_refused_credential_and_scores_every_scenario(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_pause, "BACKOFF", Backoff(0.001, 0.001))
    failure = Failure(
        boundary=Boundary.TOOL, code="tool_unauthorized", message="crm: 401", component="tools", retryable=True
    )
    call = ToolCall(turn=0, name="search", raw="{}", arguments={}, outcome=CallOutcome.OK, text="found")
    async with staged() as stage:
        refused_groups: list[str] = []
        replaced = asyncio.Event()

        def refuse(request: Any, group: Any) -> Any:
            if replaced.is_set():
                return replace(group, episodes=[replace(episode, tool_calls=[call]) for episode in group.episodes])
            refused_groups.append(request.group_id)
            refused = replace(group.episodes[0], failure=failure, reward=None, stop_reason=StopReason.FAILED)
            return replace(group, episodes=[refused])

        stage.workers[0].script = refuse
        run = LearnerRun(stage.but(max_steps=1))
        ends = asyncio.create_task(run.main())
        try:
            await until(lambda: run.progress.state.tools.wait, 20)
            assert run.progress.state.tools.wait.startswith("crm: 401; since ")
            await until(lambda: len(refused_groups) > 3 * ATTEMPTS, 20)
        finally:
            replaced.set()
            await ends
        assert not run.progress.state.tools.wait
        before = stage.summary["before"]
        assert (before["episodes"], before["exceptions"]) == (3.0, 0.0)
        assert stage.summary["failures"] == {"tool/tool_unauthorized": len(refused_groups)}
        assert len(set(refused_groups)) == len(refused_groups), "a worker knows each attempt by a name of its own"


async def test_too_many_failures_stop_the_run_with_a_typed_reason(staged: Any) -> None:
    async with staged() as stage:
        failure = Failure(boundary=Boundary.USER_CODE, code="user_code_raised", message="KeyError: 'x'")
        stage.workers[0].script = lambda request, group: (
            replace(group, episodes=[replace(episode, failure=failure, reward=None) for episode in group.episodes])
            if request.purpose == "train"
            else group
        )
        with pytest.raises(KestrlError) as caught:
            await train(stage.settings)
        assert caught.value.code == "too_many_failures"
        assert "user_code" in str(caught.value)
        assert stage.summary["status"] == "failed"
        assert "too_many_failures" in stage.summary["reason"]
        # What a person looks for after such an end: the groups that no step took, where the next step would be.
        failed = stage.stored(1)
        assert {each.outcome for each in failed} <= {GroupOutcome.DROPPED, GroupOutcome.RETRIED}
        assert {episode.failure for each in failed for episode in each.group.episodes} == {failure}


def without_scores(group: Group) -> Group:
    failure = Failure(boundary=Boundary.JUDGE, code=UNSCORED, message="ruler: not scored (unavailable): status 503")
    return replace(group, episodes=[replace(episode, failure=failure, reward=None) for episode in group.episodes])


async def test_unscored_groups_are_masked_and_counted(staged: Any) -> None:
    async with staged() as stage:
        trained: list[Any] = []

        def script(request: Any, group: Any) -> Any:
            if request.purpose != "train":
                return group
            trained.append(request)
            return without_scores(group) if len(trained) in {1, 2, 3} else group

        stage.workers[0].script = script
        await train(stage.but(epochs=1, max_failed_share=0.0))
        assert stage.summary["status"] == "succeeded"
        assert stage.states == {"dropped": 3, "trained": 3}
        size = stage.settings.algorithm.group_size
        assert stage.summary["failures"] == {"judge/unscored": 3 * size}
        masked = [each for each in all_stored(stage) if each.outcome is GroupOutcome.MASKED]
        assert len(masked) == 3
        assert all("status 503" in each.reason for each in masked)


async def test_a_run_whose_groups_are_all_unscored_stops(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].script = lambda request, group: without_scores(group) if request.purpose == "train" else group
        with pytest.raises(KestrlError) as caught:
            await train(stage.settings)
        assert (caught.value.boundary, caught.value.code) == (Boundary.JUDGE, "no_group_scored")
        assert "status 503" in stage.summary["reason"]


async def test_engines_that_sample_from_something_else_stop_the_run(staged: Any) -> None:
    async with staged() as stage:

        def lie(request: Any, group: Any) -> Any:
            for episode in group.episodes:
                for row in episode.rows:
                    for place, on in enumerate(row.mask):
                        if on:
                            row.logprobs[place] -= 0.01
            return group

        stage.workers[0].script = lie
        with pytest.raises(KestrlError) as caught:
            await train(stage.settings)
        assert caught.value.code == "logprob_gap"
        assert "engine-0 on test.0." in str(caught.value)


async def test_with_staleness_an_engine_with_other_weights_stops_the_run(staged: Any) -> None:
    """Its tokens are of an older policy than the newest, all of them."""
    async with staged() as stage:

        def lie(request: Any, group: Any) -> Any:
            for episode in group.episodes:
                for row in episode.rows:
                    older = row.policies[0].startswith("test.1.") and request.purpose == "train"
                    for place, on in enumerate(row.mask):
                        row.logprobs[place] -= 0.01 if on and older else 0.0
            return group

        stage.workers[0].script = lie
        with pytest.raises(KestrlError) as caught:
            await train(stage.but(algorithm={"max_staleness": 1, "correction": DECOUPLED}))
        assert caught.value.code == "logprob_gap"
        assert "step 3: " in str(caught.value)
        assert re.search(r"engine-\d on test\.1\.\w+: mean 0\.01 above", str(caught.value))


async def test_an_engine_whose_weights_change_amid_a_versions_rollouts_stops_the_run(staged: Any) -> None:
    """The first group of the version is as it should be."""
    async with staged() as stage:
        first: list[str] = []

        def lie(request: Any, group: Any) -> Any:
            if request.purpose != "train" or request.policy.step != 1:
                return group
            first.append(request.group_id)
            for row in [row for episode in group.episodes for row in episode.rows if request.group_id != first[0]]:
                for place, on in enumerate(row.mask):
                    row.logprobs[place] -= 0.01 if on else 0.0
            return group

        stage.workers[0].script = lie
        with pytest.raises(KestrlError, match="step 3: ") as caught:
            await train(stage.but(algorithm={"max_staleness": 1, "correction": DECOUPLED}))
        assert caught.value.code == "logprob_gap"


async def test_tokens_of_another_policy_are_refused_and_counted(staged: Any) -> None:
    async with staged() as stage:
        refused: list[str] = []

        def wrong(request: Any, group: Any) -> Any:
            if request.purpose == "train" and not refused:
                refused.append(request.group_id)
                turns = [replace(turn, policy="test.9.0123456789ab") for turn in group.episodes[0].turns]
                return replace(group, episodes=[replace(group.episodes[0], turns=turns), *group.episodes[1:]])
            return group

        stage.workers[0].script = wrong
        await train(stage.but(max_steps=2))
        assert refused
        assert [name.partition("/")[0] for name in stage.summary["failures"]] == ["engine"]
        assert all(group.id != refused[0] for group in stage.groups(1))


async def test_an_engine_that_fails_the_proof_is_named_in_no_request(staged: Any) -> None:
    async with staged() as stage:
        stage.agents[1].fail = lambda _: EngineFailure("the probe differs", code="probe_mismatch", retryable=False)
        await train(stage.but(max_steps=2))
        assert {engine.name for request in stage.asked() for engine in request.engines} == {"engine-0"}
        assert stage.summary["failures"]["engine/probe_mismatch"] >= 1


async def test_without_any_proof_the_run_fails_and_says_which_engine_said_what(staged: Any) -> None:
    async with staged() as stage:
        for agent in stage.agents:
            agent.fail = lambda _: EngineFailure("the probe differs by 3", code="probe_mismatch", retryable=False)
        with pytest.raises(KestrlError) as caught:
            await train(stage.settings)
        assert caught.value.code == "no_engine_proved"
        assert "the probe differs by 3" in str(caught.value)


async def test_a_drain_writes_a_checkpoint_and_a_resume_finishes_the_run(staged: Any) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.but(checkpoint_every=100))

        def drain_at_third(request: Any, group: Any) -> Any:
            if request.purpose == "train" and request.policy.step == 2:
                run.drain()
            return group

        stage.workers[0].script = drain_at_third
        async with asyncio.timeout(20):
            await run.main()
        assert stage.summary["status"] == "suspended"
        done = stage.summary["steps"]
        assert done in {2, 3}
        stage.workers[0].script = lambda _, group: group
        await train(stage.settings)
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["steps"] == 6
        assert stage.states == {"trained": 12}


@dataclass
class Stop:
    """A step whose update is about to begin, and what a kill within it would leave."""

    steps: list[int]
    saved: list[list[int]]


def stops(monkeypatch: pytest.MonkeyPatch, run: LearnerRun, *, drain_at: int | None = None) -> Stop:
    """Records the confirmed checkpoints at the beginning of each update; drains when a step's groups are complete."""
    made, update, take = Stop([], []), TrainingRun._update, Dispatcher.take

    async def updating(self: TrainingRun, *arguments: Any) -> Any:
        made.steps.append(self._done)
        made.saved.append(checkpoint.steps(self._resources.store))
        return await update(self, *arguments)

    async def taking(self: Dispatcher, step: int) -> Any:
        ready = await take(self, step)
        if step == drain_at:
            run.drain()
        return ready

    monkeypatch.setattr(TrainingRun, "_update", updating)
    monkeypatch.setattr(Dispatcher, "take", taking)
    return made


async def test_a_drain_writes_a_checkpoint_before_an_update_that_may_be_cut(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.but(checkpoint_every=100, validation=None))
        made = stops(monkeypatch, run, drain_at=2)
        await run.main()
        assert stage.summary["status"] == "suspended"
        assert made.steps == [0, 1, 2]
        assert made.saved == [[], [], [2]]


async def test_updates_that_take_longer_than_a_stop_waits_lose_one_step_at_most(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.but(checkpoint_every=100, validation=None, grace_seconds=1e-9, max_steps=4))
        made = stops(monkeypatch, run)
        await run.main()
        assert [max(saved, default=0) for saved in made.saved] == [0, 1, 2, 3]


async def test_a_drain_does_not_wait_for_rollouts(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].gate = asyncio.Event()
        run = LearnerRun(stage.settings)
        task = asyncio.create_task(run.main())
        async with asyncio.timeout(20):
            while not stage.asked():  # noqa: ASYNC110 - what a fake saw has no event
                await asyncio.sleep(0.01)
            run.drain()
            await task
        assert stage.summary["status"] == "suspended"
        assert stage.summary["steps"] == 0


@pytest.mark.parametrize("name", ["gspo", "cispo", "dr_grpo", "reinforce++", "gdpo"])
async def test_a_run_trains_with_each_kind_of_algorithm(staged: Any, name: str) -> None:
    preset = PRESETS[name]
    changes = {"name": name, "advantage": preset.advantage, "loss": preset.loss, "aggregation": preset.aggregation}
    async with staged() as stage:
        await train(stage.but(max_steps=2, algorithm={**changes, "kl_coefficient": 0.01, "horizon": 64}))
        assert stage.summary["learned"] is True
        assert stage.states["trained"] == 4


async def test_dynamic_sampling_replaces_groups_of_equal_rewards(staged: Any) -> None:
    """The refused scenarios are dropped with a reason, and each step still has its whole number of groups."""
    async with staged() as stage:
        stage.workers[0].script = lambda request, group: equal_rewards(group, request.scenario.ordinal % 2)
        await train(stage.but(validation=None, max_steps=3, algorithm={"name": "dapo", "dynamic_sampling": True}))
        groups = [group for step in range(3) for group in stage.groups(step + 1)]
        assert len(groups) == 6
        assert all(group.scenario.ordinal % 2 == 0 for group in groups)
        assert "dynamic sampling" in stage.reasons[0]


async def test_a_step_that_refuses_every_group_ends_the_run(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].script = lambda _, group: equal_rewards(group, 1)
        settings = stage.but(validation=None, algorithm={"dynamic_sampling": True, "max_sampled_batches": 2})
        with pytest.raises(KestrlError, match=r"rejected 4 groups.*maxSampledBatches"):
            await train(settings)
        assert "user_code/nothing_to_compare" in stage.summary["reason"]


def equal_rewards(group: Group, wanted: int) -> Group:
    if not wanted:
        return group
    return replace(group, episodes=[replace(episode, reward=0.5) for episode in group.episodes])


async def test_rows_that_would_leave_the_jobs_agent_are_refused_by_row_and_field(staged: Any, tmp_path: Path) -> None:
    async with staged() as stage:
        data = tmp_path / "loops.jsonl"
        data.write_text('{"id": 1, "question": "?"}\n{"id": 2, "question": "?", "agent_name": "single_turn"}\n')
        read = stage.settings.data.model_copy(update={"path": str(data), "size": None, "runner": "agent.url"})
        with pytest.raises(UserInputError, match=r"loops.jsonl:2: agent_name: 'single_turn' .* by agent.url"):
            await train(stage.but(data=read))


async def test_a_task_that_is_trained_on_and_held_out_is_reported(
    staged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def write_rows(data: DataSettings, seed: int) -> None:
        rows = [{"id": f"sum-{seed}-{row}", "question": "?", "digest": str(seed + row)} for row in range(3)]
        Path(data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))

    report = "data.validation: 2 of 3 rows have a task of data.train, such as 'sum-43-0', which is that of 'sum-42-1'"
    async with staged() as stage:
        write_rows(stage.settings.data, 42)
        write_rows(stage.settings.validation, 43)
        await train(stage.but(max_steps=1, held_out_apart=True))
        assert report in caplog.text
        assert stage.summary["status"] == "succeeded"
        events = [entry.event for entry in read_events(open_store(stage.settings.storage))]
        assert [event for event in events if isinstance(event, ActivityNoted) and event.message.startswith(report)]


async def test_a_data_set_that_is_named_twice_is_not_reported(staged: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with staged() as stage:
        await train(stage.but(max_steps=1, validation=stage.settings.data))
        assert "data.validation" not in caplog.text


async def test_an_overlong_row_is_skipped_and_counted(staged: Any) -> None:
    too_long = Failure(boundary=Boundary.INFRASTRUCTURE, code="prompt_too_long", message="5000 tokens")

    def refuse_two(_: Any, group: Any) -> Any:
        if group.scenario.ordinal not in {1, 2}:
            return group
        broken = {"failure": too_long, "reward": None, "rows": (), "turns": (), "stop_reason": StopReason.FAILED}
        return replace(group, episodes=[replace(episode, **broken) for episode in group.episodes])

    async with staged(max_failed_share=0.0) as stage:
        stage.workers[0].script = refuse_two
        await train(stage.settings)
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert stage.summary["skipped_rows"] == 4  # two of the training rows, two of those held out
        assert stage.states == {"trained": 8, "dropped": 4}
        assert stage.summary["before"]["episodes"] == 1.0
