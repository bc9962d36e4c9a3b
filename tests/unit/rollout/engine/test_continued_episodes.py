"""Groups that continue over an update: each turn is of the version that is the newest when it begins, and one whose
version became too old while it was sampled is cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, FakeEngine, Prompt

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import Episode, PolicyVersion
from kestrl.episode.codec import policy_to_proto
from kestrl.errors import FailureError

CALL = '<tool_call>{"name": "search", "arguments": {"word": "kestrel"}}</tool_call>'
CUTS = ("cut_turns", "cut_seconds", "cut_tokens", "uncounted_cuts")
VERSIONS = [PolicyVersion(job="job", step=step, sha256=f"{step:02d}" * 32) for step in range(10)]


def load(engine: FakeEngine, folder: Path, versions: Sequence[PolicyVersion] = VERSIONS) -> None:
    """Has an engine serve versions, each with weights of its own."""
    for version in versions:
        weights = folder / version.name / "adapter_model.safetensors"
        weights.parent.mkdir(exist_ok=True)
        weights.write_text(version.name)
        engine.adapters[version.name] = str(weights.parent)


def continuing(stage: Any, *, begun: int = 0, newest: int = 0, max_age: int = 1, **changes: Any) -> pb.RunGroupRequest:
    """A request for a group that continues over updates."""
    request: pb.RunGroupRequest = stage.request(policy=VERSIONS[begun], **changes)
    request.continuation.CopyFrom(
        pb.Continuation(max_age=max_age, newest=policy_to_proto(VERSIONS[newest]), engines=request.engines)
    )
    return request


async def publish(stage: Any, step: int, *, revision: int | None = None) -> None:
    """Reports a version as the newest, served by every engine."""
    stub: Any = stubs.RolloutServiceStub(stage.channel)
    engines = [pb.Engine(name=f"engine-{number}", url=engine.url) for number, engine in enumerate(stage.engines)]
    revision = step if revision is None else revision
    await rpc.call(
        stub.UpdateEngines,
        pb.UpdateEnginesRequest(
            policy=policy_to_proto(VERSIONS[step]), engines=engines, engines_revision=revision, newest=True
        ),
        pb.UpdateEnginesResponse,
        timeout=5,
        peer="rollout",
        token=Secret.LEARNER_TO_ROLLOUT.here(),
    )


async def episodes_of(stage: Any, request: pb.RunGroupRequest) -> Sequence[Episode]:
    return [event async for event in stage.stream(request)][-1].episodes


def steps_of(episode: Episode) -> list[int]:
    """The step of each turn's version."""
    names = [version.name for version in VERSIONS]
    return [names.index(turn.policy) for turn in episode.turns]


def check_tokens(engine: FakeEngine, episode: Episode) -> None:
    """Every sampled token has the log-prob of the version that its turn names, given the whole row before it."""
    for number, row in enumerate(episode.rows):
        turns = [turn for turn in episode.turns if turn.row == number]
        assert list(row.policies) == [turn.policy for turn in turns]
        assert sum(row.mask) == sum(turn.end - turn.start for turn in turns)
        for turn in turns:
            assert all(row.mask[turn.start : turn.end])
            scores = engine.scores(engine.weights(turn.policy) or "", list(row.token_ids[: turn.end]))
            assert list(row.logprobs[turn.start : turn.end]) == pytest.approx(scores[turn.start :], abs=1e-6)


async def test_a_turn_is_of_the_version_that_is_the_newest_when_it_begins(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    load(stage.engine, tmp_path)

    async def while_it_is_sampled(prompt: Prompt) -> Completion:
        await publish(stage, 1)
        return Completion(token_ids=stage.ids(f"{CALL}<|im_end|>"))

    stage.says(while_it_is_sampled, CALL, "Done.")
    (episode,) = await episodes_of(stage, continuing(stage))
    assert episode.failure is None
    assert steps_of(episode) == [0, 1, 1]
    assert episode.policy == VERSIONS[0]
    assert {name: episode.metrics[name] for name in CUTS} == dict.fromkeys(CUTS, 0)
    check_tokens(stage.engine, episode)


@pytest.mark.parametrize("counts", [True, False], ids=["engine that aborts", "engine that does not"])
async def test_a_turn_whose_version_became_too_old_is_cut_and_sampled_again(
    make_stage: Any, tmp_path: Path, counts: bool
) -> None:
    stage = await make_stage()
    load(stage.engine, tmp_path)
    if not counts:
        await stage.engine.stop()
        stage.engine.aborted_tokens = None
        await stage.engine.start()
        load(stage.engine, tmp_path)
    begun = asyncio.Event()

    async def never_ends(prompt: Prompt) -> Completion:
        if prompt.model == VERSIONS[0].name:
            begun.set()
            await asyncio.Event().wait()
        return Completion(token_ids=stage.ids("Done.<|im_end|>"))

    stage.says(CALL, never_ends)
    running = asyncio.create_task(episodes_of(stage, continuing(stage, max_age=2)))
    await asyncio.wait_for(begun.wait(), 10)
    calls = len(stage.tools.calls)
    await publish(stage, 1)
    await publish(stage, 2)
    await stage.capacity()
    assert [prompt.model for prompt in stage.engine.prompts[1:]] == [VERSIONS[0].name], "two steps behind is allowed"
    await publish(stage, 3)
    (episode,) = await asyncio.wait_for(running, 10)
    assert episode.failure is None
    assert steps_of(episode) == [0, 3]
    assert (episode.metrics["cut_turns"], episode.metrics["engine_retries"]) == (1, 0)
    assert episode.metrics["cut_seconds"] > 0
    counted = {"cut_tokens": 3, "uncounted_cuts": 0} if counts else {"cut_tokens": 0, "uncounted_cuts": 1}
    assert {name: episode.metrics[name] for name in counted} == counted
    assert len(stage.tools.calls) == calls == 1, "what its tools did stays"
    _, cut, again = stage.engine.prompts
    assert (cut.token_ids, cut.sampling["seed"]) == (again.token_ids, again.sampling["seed"])
    check_tokens(stage.engine, episode)


async def test_other_groups_keep_their_version(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    load(stage.engine, tmp_path)

    async def while_it_is_sampled(prompt: Prompt) -> Completion:
        await publish(stage, 9)
        return Completion(token_ids=stage.ids(f"{CALL}<|im_end|>"))

    stage.says("Done.")
    await episodes_of(stage, continuing(stage))
    stage.says(while_it_is_sampled, "Done.")
    episode = await stage.episode(policy=VERSIONS[0])
    assert steps_of(episode) == [0, 0]
    assert "cut_turns" not in episode.metrics


async def test_what_a_replaced_learner_published_is_forgotten(make_stage: Any, tmp_path: Path) -> None:
    """A learner that resumes from before a version has none of it, and its lists have larger numbers."""
    stage = await make_stage()
    load(stage.engine, tmp_path)
    stage.says("Done.")
    await episodes_of(stage, continuing(stage, newest=5, engines_revision=5))
    (late,) = await episodes_of(stage, continuing(stage, newest=3, engines_revision=4))
    assert steps_of(late) == [5]
    (episode,) = await episodes_of(stage, continuing(stage, newest=3, engines_revision=100))
    assert steps_of(episode) == [3]
    await publish(stage, 6, revision=6)
    (episode,) = await episodes_of(stage, continuing(stage, newest=3, engines_revision=100))
    assert steps_of(episode) == [3]


@pytest.mark.parametrize("seed", range(3))
async def test_updates_at_any_time_leave_exact_tokens(make_stage: Any, tmp_path: Path, seed: int) -> None:
    stage = await make_stage()
    load(stage.engine, tmp_path)
    chance, newest = random.Random(seed), 0
    stage.says(*[CALL] * 5, "Done.")
    inner = stage.engine.script
    publishing = asyncio.Lock()

    async def with_updates(prompt: Prompt) -> Any:
        nonlocal newest
        async with publishing:
            if newest < len(VERSIONS) - 1 and chance.random() < 0.4:
                newest += 1
                await publish(stage, newest)
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        return inner(prompt)

    stage.engine.script = with_updates
    episodes = await episodes_of(stage, continuing(stage, size=6))
    assert [episode.failure for episode in episodes] == [None] * 6
    for episode in episodes:
        assert len(episode.turns) == 6
        assert steps_of(episode) == sorted(steps_of(episode))
        check_tokens(stage.engine, episode)
    assert any(len(set(steps_of(episode))) > 1 for episode in episodes)
    attempts = len(stage.engine.prompts) - sum(len(episode.turns) for episode in episodes)
    assert sum(episode.metrics["cut_turns"] for episode in episodes) == attempts


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("continuation.newest", {"begun": 2, "newest": 1}),
        ("continuation.max_age", {"max_age": 0}),
        ("continuation: is for training", {"purpose": "evaluation"}),
    ],
)
async def test_a_continuation_that_cannot_be_is_refused(stage: Any, field: str, change: dict[str, Any]) -> None:
    with pytest.raises(FailureError, match=field):
        await episodes_of(stage, continuing(stage, **change))
