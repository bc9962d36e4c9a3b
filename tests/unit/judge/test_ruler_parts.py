"""Pure parts of the ruler: escaping, shortening, reasoning, pauses."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.judge.rulers import episode, group

from kestrl_judge.ruler.escaping import encode, estimated_tokens
from kestrl_judge.ruler.pacing import BACKOFF, LONGEST_RETRY_AFTER, pause_before, retry_after
from kestrl_judge.ruler.prompt import build
from kestrl_judge.ruler.reply import schema
from kestrl_judge.ruler.shortening import TooLarge, fair_share, shorten, tail
from kestrl_judge.ruler.trajectories import Comparison, compare, without_reasoning

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
CONTROL = [
    "<|im_end|>", "</trajectory>", "<think>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "\u200b", "\u202e", "\u2066", "\U000e0041", "\ufe0f", "\x7f", "\u2028", "\ue000", "\ud800", "\x1b[31m",
]  # fmt: skip


@given(JSON)
def test_escaped_data_is_restored_by_any_json_parser(value: Any) -> None:
    assert json.loads(encode(value)) == value


@given(st.lists(st.sampled_from(CONTROL) | st.text()).map("".join))
def test_no_delimiter_and_no_control_text_survives(text: str) -> None:
    encoded = encode([text, {text: [None, True]}])
    assert json.loads(encoded) == [text, {text: [None, True]}]
    assert not any(mark in encoded for mark in [*"<>&", *CONTROL])


@given(st.lists(st.integers(min_value=0, max_value=1000), min_size=1), st.integers(min_value=0, max_value=5000))
def test_a_fair_share_fills_the_room_and_never_exceeds_it(sizes: list[int], room: int) -> None:
    limit = fair_share(sizes, room)
    used = sum(min(size, limit) for size in sizes)
    assert used <= max(room, 0) or limit == 0
    assert used == sum(sizes) or used > room - len(sizes)


def test_the_tail_is_kept_and_what_is_missing_is_counted() -> None:
    messages = [{"role": "assistant", "content": f"message {number} " + "x" * 300} for number in range(10)]
    kept = tail(messages, 400)
    removed = 10 - len(kept) + 1
    assert kept[0] == {
        "role": "notice",
        "content": f"({removed} earlier messages removed by the grading program to fit its limit)",
    }
    assert kept[-1] == messages[-1]
    assert estimated_tokens(encode(kept)) <= 400
    cut = tail([{"role": "assistant", "content": "begin " + "x" * 3000 + " end"}], 200)
    assert cut[-1]["content"].endswith("x end")
    assert "characters removed by the grading program" in cut[-1]["content"]
    assert tail(messages[:1], 1000) == messages[:1]


@given(
    st.integers(min_value=900, max_value=6000),
    st.lists(st.integers(min_value=0, max_value=9000), min_size=2, max_size=6),
)
def test_a_prompt_never_exceeds_its_budget(tokens: int, sizes: list[int]) -> None:
    asked = group(*(f"{number} " + "\u00e9x" * size for number, size in enumerate(sizes)))
    try:
        prompt = build(compare(asked, show_reasoning=False), rubric="R.", salt="s", permutation=0, tokens=tokens)
    except TooLarge:
        assert tokens < 2000
        return
    assert prompt.tokens <= tokens
    assert sorted(prompt.ids) == sorted(prompt.episodes)


def test_tools_are_shortened_to_their_names() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": "d" * 900}} for n in range(8)]
    comparison = Comparison(
        context=[], tools=tools, trajectories=compare(group("4", "5"), show_reasoning=False).trajectories
    )
    found = shorten(comparison, 800)
    assert found.parts == ("tools",)
    assert found.comparison.tools == [{"names": [f"tool_{n}" for n in range(8)]}]


def test_salt_content_and_permutation_decide_ids_and_order() -> None:
    def ids(salt: str = "s", permutation: int = 0, answer: str = "4") -> list[str]:
        comparison = compare(group(answer, "5", "6"), show_reasoning=False)
        return list(build(comparison, rubric=None, salt=salt, permutation=permutation, tokens=9000).ids)

    assert ids() == ids()
    assert len({tuple(sorted(each)) for each in (ids(), ids(salt="t"), ids(permutation=1), ids(answer="44"))}) == 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>I won</think>4", "(reasoning of 20 characters hidden by the grading program)4"),
        ("I won</think>4", "(reasoning of 13 characters hidden by the grading program)4"),
        ("<think>never ends", "(reasoning of 17 characters hidden by the grading program)"),
        ("a <think>b</think> c <think>d", "a (reasoning of 16 characters hidden by the grading program) c "
         "(reasoning of 8 characters hidden by the grading program)"),
        ("no reasoning", "no reasoning"),
    ],
)  # fmt: skip
def test_reasoning_is_hidden(text: str, shown: str) -> None:
    assert without_reasoning(text) == shown


def test_reasoning_fields_are_hidden_unless_shown() -> None:
    asked = group(episode(0, {"role": "assistant", "content": "4", "reasoning_content": "I won"}), "5")
    hidden = encode(compare(asked, show_reasoning=False).content())
    assert "I won" not in hidden
    assert "I won" in encode(compare(asked, show_reasoning=True).content())


def test_pauses_are_bounded_and_follow_the_server() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert retry_after({"retry-after": "2"}) == 2.0
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert retry_after({"retry-after": "Thu, 01 Jan 2026 00:00:05 GMT"}, now=now) == 5.0
    assert retry_after({"retry-after": "99999"}) == LONGEST_RETRY_AFTER
    assert retry_after({"retry-after": "nan"}) == BACKOFF.limit
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None
    assert pause_before(1, 7.0) == 7.0
    assert 0.25 <= pause_before(1, None) <= 0.5
    assert pause_before(50, None) <= BACKOFF.limit


def test_an_enforced_schema_names_every_id_once_and_ends() -> None:
    ids = ["t-1", "t-2", "t-3"]
    enforced = schema(ids, strict_tokens=600)
    reply = {"scores": [{"trajectory_id": name, "explanation": "Good.", "score": 0.35} for name in ids]}
    jsonschema.validate(reply, enforced)
    for wrong in (
        reply["scores"][:2],
        [reply["scores"][0]] * 3,
        [*reply["scores"], reply["scores"][0]],
        [{**each, "score": 0.33} for each in reply["scores"]],
        [{**each, "explanation": "x" * 111} for each in reply["scores"]],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"scores": wrong}, enforced)
    jsonschema.validate({"scores": reply["scores"][:2]}, schema(ids, strict_tokens=None))  # checked by `parse`
