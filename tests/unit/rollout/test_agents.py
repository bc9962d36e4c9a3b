"""Agent loops of a user's: plain classes and functions, what they may do, and whose failure it is when they raise."""

from __future__ import annotations

import importlib
import logging
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Fault

from kestrl.episode import Scenario, StopReason
from kestrl.errors import Boundary, UserInputError
from kestrl_rollout.agents.loading import load_loop

MakeFile = Callable[[str, str], str]

TWO_QUESTIONS = """
from kestrl.episode import StopReason

class Agent:
    async def run(self, conversation):
        first = await conversation.generate()
        conversation.append_user(f"Are you sure of {first.content}?")
        second = await conversation.generate()
        conversation.metrics["sure"] = float(second.content == "Yes.")
        conversation.stop(StopReason.ANSWERED)
        assert await conversation.generate() is None
        assert conversation.messages[-1]["content"].endswith("Yes.")
        assert conversation.seed and conversation.scenario.ground_truth == "42"
        assert [tool.name for tool in conversation.tools] == ["search", "answer"]
"""


async def test_a_users_class_drives_the_conversation(make_stage: Any, make_file: MakeFile) -> None:
    stage = await make_stage(agent=make_file("two_questions", TWO_QUESTIONS) + ":Agent")
    stage.says("<think>Hm.</think>42", "Yes.")
    episode = await stage.episode()
    assert episode.failure is None
    assert episode.metrics["sure"] == 1.0
    assert episode.metrics["forks"] == 0
    assert [said["role"] for said in episode.messages] == ["user", "assistant", "user", "assistant"]
    assert len(episode.rows) == 1


async def test_a_template_that_forgets_reasoning_forks_a_row(
    make_stage: Any, make_file: MakeFile, write_model: Callable[..., Path], forgetful_template: str
) -> None:
    folder = write_model(template=forgetful_template)
    stage = await make_stage(agent=make_file("two_questions", TWO_QUESTIONS) + ":Agent", folder=folder)
    stage.says("<think>Hm.</think>42", "Yes.")
    episode = await stage.episode()
    assert episode.failure is None
    first, second = episode.rows
    decode = stage.chat_model.vocabulary.decode
    assert decode(first.token_ids).endswith("<think>Hm.</think>42<|im_end|>")
    assert "<think>" not in decode(second.token_ids)
    assert "<|im_start|>assistant\n42<|im_end|>\n<|im_start|>user\nAre you sure of 42?" in decode(second.token_ids)
    assert [turn.row for turn in episode.turns] == [0, 1]
    assert decode([token for token, on in zip(second.token_ids, second.mask, strict=True) if on]) == "Yes.<|im_end|>"
    assert episode.metrics["forks"] == 1
    assert list(stage.engine.prompts[1].token_ids) == list(second.token_ids[: episode.turns[1].start])


async def test_a_function_is_a_loop_too(make_stage: Any, make_file: MakeFile) -> None:
    name = make_file("as_function", "async def agent(conversation):\n    await conversation.generate()\n")
    stage = await make_stage(agent=f"{name}:agent")
    stage.says("Hello.")
    assert (await stage.episode()).stop_reason is StopReason.ANSWERED


RAISING = """
import asyncio, sys

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt

async def nested():
    raise KeyError("nested")

class Agent:
    async def run(self, conversation):
        await conversation.generate()
        if conversation.seed == 7:
            {raises}
"""


@pytest.mark.parametrize(
    ("raises", "expected"),
    [
        ("raise KeyError('answer')", "KeyError: 'answer'"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit('closed')", "GeneratorExit: closed"),
        ("raise BaseExceptionGroup('both', [KeyboardInterrupt(), ValueError()])", "BaseExceptionGroup: both"),
        ("raise Own('base')", "Own: base"),
        ("raise Mute", "Mute: (its __str__ raised KeyboardInterrupt)"),
        ("raise ValueError('a' + chr(0xD800) + 'b')", "ValueError: a?b"),
        ("await asyncio.gather(nested())", "KeyError: 'nested'"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
    ],
)
async def test_a_loop_that_raises_fails_its_episode_and_no_other(
    make_stage: Any, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, raises: str, expected: str
) -> None:
    # pytest-xdist cannot send a captured log with a lone surrogate.
    monkeypatch.setattr(logging.getLogger("kestrl_rollout.groups.episodes"), "disabled", "D800" in raises)
    name = make_file("raising", RAISING.format(raises=raises))
    stage = await make_stage(agent=f"{name}:Agent")
    stage.says("Hello.")
    first, second = (await stage.run(size=2)).episodes
    assert first.failure is not None
    assert (first.failure.boundary, first.failure.code) == (Boundary.USER_CODE, "agent_raised")
    assert expected in first.failure.message
    assert "raising:Agent" in first.failure.message
    assert first.sampled_tokens > 0
    assert second.failure is None
    assert second.reward == 1.0


SWALLOWING = """
from kestrl.errors import ToolFailure

class Agent:
    async def run(self, conversation):
        for _ in range(3):
            try:
                await conversation.generate()
            except Exception:
                pass
        {after}
"""


@pytest.mark.parametrize("after", ["pass", "raise ValueError('no answer')", "raise ToolFailure('mine')"])
async def test_a_loop_cannot_swallow_what_the_platform_broke(make_stage: Any, make_file: MakeFile, after: str) -> None:
    name = make_file("swallowing", SWALLOWING.format(after=after))
    stage = await make_stage(agent=f"{name}:Agent")
    stage.says(Fault(status=500))
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.ENGINE, "engine_error")
    assert len(stage.engine.prompts) == 1


STUBBORN = """
import asyncio

going = []

async def agent(conversation):
    going.append(asyncio.Event())
    while not going[-1].is_set():
        try:
            await going[-1].wait()
        except asyncio.CancelledError:
            {after}
"""


@pytest.mark.parametrize("after", ["continue", "await conversation.generate()", "return"])
async def test_a_loop_that_swallows_its_cancellation_gives_its_slot_back(
    make_stage: Any, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr("kestrl_rollout.groups.episodes.CANCEL_SECONDS", 0.05)
    name = make_file("stubborn", STUBBORN.format(after=after))
    stage = await make_stage(agent=f"{name}:agent", concurrency=1)
    stage.says("Hello.")
    limits = {"tool": 0.01, "turn": 0.1, "episode": 0.2}
    try:
        for episode in (await stage.run(size=2, deadlines=limits)).episodes:  # one after the other, in the one slot
            assert episode.failure is not None
            assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "episode_deadline")
        assert (await stage.capacity()).running == 0
    finally:
        for event in importlib.import_module(name).going:
            event.set()


async def test_loops_that_never_end_are_bounded(
    make_stage: Any, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl_rollout.groups.episodes.CANCEL_SECONDS", 0.01)
    monkeypatch.setattr("kestrl_rollout.groups.episodes.MAX_ABANDONED", 2)
    name = make_file("stubborn", STUBBORN.format(after="continue"))
    stage = await make_stage(agent=f"{name}:agent", concurrency=1)
    try:
        group = await stage.run(size=3, deadlines={"tool": 0.01, "turn": 0.1, "episode": 0.2})
        codes = [episode.failure.code for episode in group.episodes]
        assert sorted(codes) == ["agent_hangs", "episode_deadline", "episode_deadline"]
    finally:
        for event in importlib.import_module(name).going:
            event.set()


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("append_user('a' + chr(0xD800))", "bad_message"),
        ("append_user(None)", "bad_message"),
        ("stop('nonsense')", "bad_stop_reason"),
        ("stop('failed')", "bad_stop_reason"),
    ],
)
async def test_what_a_loop_cannot_say_is_the_users(make_stage: Any, make_file: MakeFile, says: str, code: str) -> None:
    name = make_file("odd", f"async def agent(conversation):\n    conversation.{says}\n")
    episode = await (await make_stage(agent=f"{name}:agent")).episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, code)


async def test_a_loop_that_hangs_is_the_users(make_stage: Any, make_file: MakeFile) -> None:
    source = "import asyncio\nasync def agent(conversation):\n    await asyncio.Event().wait()\n"
    stage = await make_stage(agent=make_file("hanging", source) + ":agent")
    episode = await stage.episode(deadlines={"tool": 0.01, "turn": 0.2, "episode": 0.3})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "episode_deadline")


MISUSING = """
from kestrl.episode import StopReason
class Agent:
    async def run(self, conversation):
        {does}
"""


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("conversation.stop(StopReason.FAILED)", "bad_stop_reason"),
        ("await conversation.generate(); await conversation.generate_tokens([1])", "mixed_loop"),
        ("await conversation.generate_tokens([1]); await conversation.generate()", "mixed_loop"),
        ("await conversation.generate_tokens([1]); conversation.keep([1], [1])", "mask_not_sampled"),
    ],
)
async def test_misuse_has_a_name(make_stage: Any, make_file: MakeFile, does: str, code: str) -> None:
    stage = await make_stage(agent=make_file("misusing", MISUSING.format(does=does)) + ":Agent")
    stage.engine.script = lambda prompt: stage.engine.sample(prompt)
    episode = await stage.episode(sampling={"max_tokens_per_turn": 3})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, code)


async def test_tokens_by_hand_end_at_the_limit_without_a_failure(make_stage: Any, make_file: MakeFile) -> None:
    source = """
        async def agent(conversation):
            prompt = [1, 2, 3]
            while True:
                completion = await conversation.generate_tokens(prompt, max_tokens=4, stop_token_ids=[5])
                prompt += [*completion.token_ids, 9]
    """
    stage = await make_stage(agent=make_file("by_hand", textwrap.dedent(source)) + ":agent")
    episode = await stage.episode(sampling={"max_tokens": 10})
    assert episode.failure is None
    assert episode.stop_reason is StopReason.MAX_TOKENS
    assert episode.sampled_tokens == 10
    assert len(episode.rows) == 1
    assert stage.engine.prompts[0].sampling["stop_token_ids"] == [258, 5]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("chatty", "neither built in (tool_agent, compacting_agent, single_turn)"),
        ("no.such:Agent", "cannot import 'no.such'"),
        ("loops:Missing", "has no 'Missing'"),
        ("loops:number", "neither a class nor an async function"),
        ("loops:NoRun", "has no `async def run"),
        ("loops:Greedy", "cannot be constructed from agent.config alone"),
        ("broken:Agent", "ZeroDivisionError"),
    ],
)
def test_a_loop_that_cannot_be_used_is_refused_at_the_start(make_file: MakeFile, path: str, expected: str) -> None:
    make_file("broken", "1 / 0\n")
    make_file(
        "loops",
        "number = 5\nclass NoRun: pass\n"
        "class Greedy:\n    def __init__(self, more): pass\n    async def run(self, conversation): pass\n",
    )
    with pytest.raises(UserInputError) as refused:
        load_loop(path)
    assert expected in str(refused.value)
    assert "agent.loop" in str(refused.value)


CONFIGURED = """
from kestrl.rewards import Score

class Agent:
    def __init__(self, reward, *, metrics=None):
        self.reward, self.metrics = reward, metrics

    async def run(self, conversation):
        await conversation.generate()
        return self.reward if self.metrics is None else Score(value=self.reward, metrics=self.metrics)

async def agent(conversation, reward=None):
    await conversation.generate()
    return float(reward) if isinstance(reward, str) else reward
"""


@pytest.mark.parametrize(
    ("loop", "config", "reward"),
    [
        ("Agent", {"reward": 0.5}, 0.5),
        ("Agent", {"reward": -2, "metrics": {"solved": True}}, -2.0),
        ("agent", {"reward": 1}, 1.0),
        ("agent", {}, None),
    ],
)
async def test_a_loop_is_configured_and_may_return_the_reward(
    make_stage: Any, make_file: MakeFile, loop: str, config: dict[str, Any], reward: float | None
) -> None:
    stage = await make_stage(agent=f"{make_file('configured', CONFIGURED)}:{loop}", agent_config=config)
    stage.says("Hello.")
    episode = await stage.episode()
    assert episode.failure is None
    assert episode.loop_reward == reward
    assert episode.metrics.get("loop_reward") == reward
    assert episode.metrics.get("solved") == (1.0 if "metrics" in config else None)
    (request,) = stage.judge.requests
    assert request.group.episodes[0].HasField("loop_reward") == (reward is not None)


async def test_a_loop_that_a_row_selects_has_a_configuration_of_its_own(make_stage: Any, make_file: MakeFile) -> None:
    path = make_file("configured", CONFIGURED) + ":agent"
    named, configs = {"other": path, "broken": path}, {"other": {"reward": 0.25}, "broken": {"more": 2}}
    with pytest.raises(UserInputError, match=rf"^agent\.loopsConfig\.broken: does not fit {path}: "):
        await make_stage(agent=path, agent_config={"reward": 0.5}, agents=named, agents_config=configs)
    del named["broken"], configs["broken"]
    stage = await make_stage(agent=path, agent_config={"reward": 0.5}, agents=named, agents_config=configs)
    stage.says("Hello.")
    for agent, reward in ("", 0.5), ("other", 0.25):
        scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "Hi."}], agent=agent)
        assert (await stage.episode(scenario=scenario)).loop_reward == reward


@pytest.mark.parametrize("reward", ["nan", "inf", "1e31", True, [1.0]])
async def test_a_returned_reward_that_is_no_usable_number_fails_the_episode(
    make_stage: Any, make_file: MakeFile, reward: Any
) -> None:
    agent = make_file("configured", CONFIGURED) + ":agent"
    stage = await make_stage(agent=agent, agent_config={"reward": reward})
    stage.says("Hello.")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "loop_reward_invalid")
    assert "agent.loop configured:agent" in episode.failure.message
    assert episode.loop_reward is None
    assert episode.reward is None


@pytest.mark.parametrize(
    ("loop", "config"),
    [("Agent", {"reward": 1, "more": 2}), ("agent", {"more": 2}), ("agent", {"conversation": 2, "more": 1})],
)
def test_config_that_does_not_fit_the_loop_is_refused_by_field(
    make_file: MakeFile, loop: str, config: dict[str, Any]
) -> None:
    path = f"{make_file('configured', CONFIGURED)}:{loop}"
    with pytest.raises(UserInputError, match=rf"^agent\.config: does not fit {path}: "):
        load_loop(path, config)


async def test_one_instance_per_episode(make_stage: Any, make_file: MakeFile) -> None:
    source = (
        "class Agent:\n    turns = 0\n    async def run(self, conversation):\n        self.turns += 1\n"
        "        await conversation.generate()\n        conversation.metrics['mine'] = self.turns\n"
    )
    stage = await make_stage(agent=make_file("counting", source) + ":Agent")
    stage.says("Hello.")
    group = await stage.run(size=3)
    assert [episode.metrics["mine"] for episode in group.episodes] == [1, 1, 1]


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("'reward'] = 5.0", "is reserved by the learner"),
        ("'mine'] = 'text'", "is a str; report a number"),
        ("'mine'] = None", "is a NoneType; report a number"),
        ("'mine'] = float('nan')", "is not finite"),
        ("'mine'] = 10 ** 400", "is not finite"),
        ("5] = 1.0", "not a printable string"),
    ],
)
async def test_a_metric_that_cannot_be_averaged_is_left_out(
    make_stage: Any, make_file: MakeFile, caplog: pytest.LogCaptureFixture, metric: str, why: str
) -> None:
    source = (
        "class Agent:\n    made = 0\n    async def run(self, conversation):\n        await conversation.generate()\n"
        f"        Agent.made += 1\n        if Agent.made == 1:\n            conversation.metrics[{metric}\n"
    )
    stage = await make_stage(agent=make_file("reporting", source) + ":Agent")
    stage.says("Hello.")
    group = await stage.run(size=3)
    assert [episode.failure for episode in group.episodes] == [None] * 3
    assert sum(episode.metrics.get("metrics_left_out", 0.0) for episode in group.episodes) == 1.0
    assert [why in record.getMessage() for record in caplog.records if "is left out" in record.getMessage()] == [True]
    assert all("mine" not in episode.metrics and "reward" not in episode.metrics for episode in group.episodes)
