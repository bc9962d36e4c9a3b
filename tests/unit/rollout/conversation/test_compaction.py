"""The loop that has the policy summarise at a budget of tokens, and the price of agents that rewrite their history."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.fakes.engine import Completion, Prompt

from kestrl.errors import UserInputError
from kestrl_rollout.agents.loading import load_loop
from kestrl_rollout.groups.loop_metrics import LoopMetrics, rewriting_of

LONG = {"sampling": {"max_turns": 20, "max_tokens": 3000}}


def in_turn(stage: Any, *said: str) -> None:
    """Scripts the engine: its n-th answer is `said[n]`."""

    def script(prompt: Prompt) -> Completion:
        return Completion(token_ids=stage.ids(said[min(prompt.index, len(said) - 1)] + "<|im_end|>"))

    stage.engine.script = script


async def test_a_summary_is_trained_and_what_follows_is_a_row(make_stage: Any, call_text: Any) -> None:
    stage = await make_stage(agent="compacting_agent", agent_config={"at": 1200, "request": "Summarise."})
    stage.tools.handlers["search"] = lambda arguments: f"found {arguments['word']} " + "x" * 300
    summary = "I looked for a and b: neither is a bird."
    in_turn(
        stage,
        call_text("search", word="a"),
        call_text("search", word="b"),
        "<think>Hm.</think>" + summary,
        call_text("search", word="c"),
        "A falcon.",
    )
    episode = await stage.episode(**LONG)
    assert episode.failure is None
    assert [turn.row for turn in episode.turns] == [0, 0, 0, 1, 1]
    assert (episode.main_row, episode.final_text, episode.metrics["compactions"]) == (1, "A falcon.", 1)
    assert [call.turn for call in episode.tool_calls] == [0, 1, 3]
    decode = stage.chat_model.vocabulary.decode
    first, second = (decode(row.token_ids) for row in episode.rows)
    assert first.endswith(f"Summarise.<|im_end|>\n<|im_start|>assistant\n<think>Hm.</think>{summary}<|im_end|>")
    assert f"Find the kestrel.\n\nWhat you did so far, in your own summary:\n{summary}" in second
    assert "found a" not in second
    assert second.count("<|im_start|>user") == 2  # the task, and a result
    # Each sampled token is trained once, those of the summary with them; what the second row quotes of it is context.
    assert sum(sum(row.mask) for row in episode.rows) == sum(turn.end - turn.start for turn in episode.turns)
    for turn in episode.turns:
        assert set(episode.rows[turn.row].mask[turn.start : turn.end]) == {1}
    said = [(message["role"], message["content"]) for message in episode.messages]
    assert ("user", "Summarise.") in said
    assert said[-1] == ("assistant", "A falcon.")


async def test_without_need_it_is_the_tool_agent(make_stage: Any, call_text: Any) -> None:
    episodes: list[Any] = []
    for agent in ("compacting_agent", "tool_agent"):
        stage = await make_stage(agent=agent)
        stage.says(call_text("search", word="a"), "A falcon.")
        episodes.append(await stage.episode())
    rows = [[list(row.token_ids) for row in episode.rows] for episode in episodes]
    assert rows[0] == rows[1]
    assert "compactions" not in episodes[0].metrics


async def test_it_compacts_as_often_as_it_must_within_the_turns(make_stage: Any, call_text: Any) -> None:
    stage = await make_stage(agent="compacting_agent", agent_config={"at": 1})
    in_turn(stage, call_text("search", word="a"), "Notes.", call_text("search", word="b"), "More.", "Done.")
    episode = await stage.episode(**LONG)
    assert (episode.failure, episode.final_text) == (None, "Done.")
    assert [turn.row for turn in episode.turns] == [0, 0, 1, 1, 2]
    assert episode.metrics["compactions"] == episode.metrics["forks"] == 2
    in_turn(stage, *[call_text("search", word="a")] * 9)
    short = await stage.episode(sampling={"max_turns": 1})
    assert (short.failure, short.stop_reason, len(short.rows)) == (None, "max_turns", 1)


async def test_a_tool_that_ends_the_episode_asks_for_no_summary(make_stage: Any, call_text: Any) -> None:
    stage = await make_stage(agent="compacting_agent", agent_config={"at": 1})
    stage.says(call_text("answer", text="42"))
    episode = await stage.episode()
    assert (episode.failure, episode.stop_reason, len(episode.turns)) == (None, "final_tool", 1)
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool"]


MIXED = """
async def agent(conversation):
    await conversation.generate()
    conversation.compact("Go on.")
    await conversation.generate_tokens([1, 2])
"""


async def test_a_loop_compacts_but_does_not_mix(make_stage: Any, make_file: Any) -> None:
    stage = await make_stage(agent=f"{make_file('mixing', MIXED)}:agent")
    stage.says("42")
    failure = (await stage.episode()).failure
    assert failure is not None
    assert failure.code == "mixed_loop"


@pytest.mark.parametrize(
    ("path", "config", "problem"),
    [
        ("compacting_agent", {"at": 0}, "agent.config: compacting_agent: at is a number of tokens, at least 1, not 0"),
        ("compacting_agent", {"at": "9"}, "agent.config: compacting_agent: at is a number of tokens"),
        ("compacting_agent", {"request": " "}, "agent.config: compacting_agent: request is a text"),
        ("compacting_agent", {"budget": 5}, "agent.config: does not fit compacting_agent"),
        ("tool_agent", {"at": 5}, "agent.config: tool_agent takes no config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(path: str, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserInputError, match=problem):
        load_loop(path, config)


def test_an_agent_that_rewrites_its_history_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"num_turns": 5.0, "forks.edited_assistant": 4.0, "fork_tokens.edited_assistant": 900.0}
    counted = LoopMetrics()
    with caplog.at_level(logging.WARNING):
        assert counted.usable("agent.run mine:agent", metrics)["rewrites_history"] == 1.0
        assert counted.usable("agent.run mine:agent", metrics)["rewrites_history"] == 1.0
    (record,) = caplog.records
    assert "4 of 4 later calls" in record.message
    assert "edited_assistant 4" in record.message
    assert "900 tokens" in record.message


@pytest.mark.parametrize(
    "forks",
    [
        {"new_conversation": 4.0},  # a title, sub-agents
        {"resampled": 4.0},
        {"branched": 4.0},
        {"compacted": 1.0},  # an agent that compacts now and then
        {"system_changed": 2.0, "num_turns": 9.0},
    ],
)
def test_rows_that_are_meant_are_no_warning(forks: dict[str, float]) -> None:
    metrics = {"num_turns": 5.0, **{name if name == "num_turns" else f"forks.{name}": n for name, n in forks.items()}}
    assert rewriting_of(metrics) is None
