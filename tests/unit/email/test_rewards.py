"""The ART-E reward, tier by tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.episode import CallOutcome, Episode, Scenario, StopReason, ToolCall, Turn
from kestrl.rewards import Attempt, Score, VerdictNeeded
from kestrl_email.rewards import art_e, art_e_compat, evidence_gated, first_search, normalised

RIGHT = "m1"
GROUND_TRUTH = {"answer": "Monday", "message_id": RIGHT, "attribute": "day", "named": ["Bo", "tea"]}
MAX_TURNS = 5
Rule = Callable[[Attempt], Score]


def call(name: str, outcome: CallOutcome = CallOutcome.OK, **data: Any) -> ToolCall:
    return ToolCall(turn=0, name=name, raw="", arguments={}, outcome=outcome, text="", data=data)


FOUND = call("search_emails", found=["m2", RIGHT])
MISSED = call("search_emails", found=["m2"])
READ = call("read_email", read=RIGHT)
READ_OTHER = call("read_email", read="m2")
READ_INVALID = call("read_email", CallOutcome.TOOL_ERROR)
UNREADABLE = call("", CallOutcome.INVALID_JSON)
CUT = call("", CallOutcome.TRUNCATED)
UNKNOWN = call("delete_all", CallOutcome.UNKNOWN_TOOL)
MISFIT = call("search_emails", CallOutcome.SCHEMA_VIOLATION)


def answer(text: str, *sources: str) -> ToolCall:
    return call("return_final_answer", answer=text, sources=list(sources))


def score(
    *calls: ToolCall,
    turns: int | None = None,
    stop: StopReason | None = None,
    rule: Rule = art_e,
    ground_truth: Mapping[str, Any] = GROUND_TRUTH,
    verdicts: Mapping[str, bool] | None = None,
) -> Score:
    final = bool(calls) and "answer" in calls[-1].data
    turns = len(calls) if turns is None else turns
    turn = Turn(index=0, row=0, start=0, end=0, text="", finish_reason="stop", engine="", policy="", seconds=0)
    episode = Episode(
        id="e", group_id="g", scenario_id="s", index=0, seed=0, rows=(), turns=(turn,) * turns,
        tool_calls=calls, messages=(),
        stop_reason=stop or (StopReason.FINAL_TOOL if final else StopReason.ANSWERED),
        failure=None, policy=None, engine="", started_at=0, seconds=0,
    )  # fmt: skip
    messages = [{"role": "user", "content": "Which day?"}]
    scenario = Scenario(id="s", ordinal=0, messages=messages, ground_truth=ground_truth)
    return rule(Attempt(scenario=scenario, episode=episode, max_turns=MAX_TURNS, verdicts=verdicts))


@pytest.mark.parametrize(
    ("calls", "value"),
    [
        pytest.param([FOUND, READ, answer("Monday", RIGHT)], 1.3 + 0.1 + 0.04, id="right, cited"),
        pytest.param([FOUND, READ, answer("Monday", RIGHT, "m2")], 1.3 + 0.05 + 0.04, id="right, one source too many"),
        pytest.param(
            [FOUND, READ, answer("Monday", RIGHT, RIGHT)], 1.3 + 0.1 + 0.04, id="right, the same source twice"
        ),
        pytest.param([FOUND, READ, answer("Monday", "m2")], 1.0 + 0.1 + 0.04, id="right, wrong source"),
        pytest.param([FOUND, READ, answer("Monday")], 1.04, id="right, no source"),
        pytest.param([answer("Monday", RIGHT)], 1.48, id="right at once"),
        pytest.param([FOUND, READ, answer("Tuesday", RIGHT)], -0.6, id="wrong, everything else right"),
        pytest.param([FOUND, READ, answer("Monday Tuesday", RIGHT)], -0.6, id="a list of guesses"),
        pytest.param([answer("Tuesday")], -1.0, id="wrong at once"),
        pytest.param([answer("")], -1.0, id="an empty answer is wrong"),
        pytest.param([FOUND, READ, answer("I don't know")], 0.3, id="gives up after reading"),
        pytest.param([FOUND, READ_OTHER, answer("i don't know.")], 0.2, id="gives up after reading another"),
        pytest.param([FOUND, READ_INVALID, READ, answer("I don't know")], 0.2, id="an invalid id costs a tenth"),
        pytest.param([answer("I don't know")], 0.0, id="giving up at once earns nothing"),
        pytest.param([], 0.0, id="says something and calls nothing"),
        pytest.param([MISSED], 0.0, id="stops after a search"),
        pytest.param([UNREADABLE], -2.0, id="unreadable"),
        pytest.param([FOUND, READ, CUT], -1.7, id="cut, after finding and reading"),
        pytest.param([UNKNOWN], -1.9, id="unknown tool"),
        pytest.param([MISFIT], -1.8, id="wrong arguments"),
        pytest.param(
            [UNREADABLE, FOUND, READ, answer("Monday", RIGHT)], 1.3 + 0.1 + 0.02, id="a corrected call is forgiven"
        ),
        pytest.param([UNREADABLE, FOUND], 0.1, id="a corrected call is forgiven without an answer too"),
    ],
)  # fmt: skip
def test_the_value_of_each_case(calls: list[ToolCall], value: float):
    assert score(*calls).value == pytest.approx(value)


def test_the_maximum_counts_sources_and_stays_below_one_and_a_half():
    assert score(FOUND, READ, answer("Monday", RIGHT), turns=0).value == pytest.approx(1.5)
    assert score(FOUND, READ, answer("Monday", RIGHT), turns=MAX_TURNS).value == pytest.approx(1.4)


def metrics(*calls: ToolCall, stop: StopReason | None = None) -> Mapping[str, float]:
    return score(*calls, stop=stop).metrics


def test_answer_correct_asks_for_the_right_mail_cited():
    assert metrics(FOUND, READ, answer("Monday", RIGHT))["answer_correct"] == 1
    uncited = metrics(FOUND, READ, answer("Monday", "m2"))
    assert (uncited["answer_correct"], uncited["answer_right"], uncited["sources_correct"]) == (0, 1, 0)
    wrong = metrics(FOUND, READ, answer("Tuesday", RIGHT))
    assert (wrong["answer_correct"], wrong["answer_right"], wrong["sources_correct"]) == (0, 0, 1)


def test_metrics_report_progress():
    far = metrics(FOUND, READ_OTHER, stop=StopReason.MAX_TURNS)
    assert far["ever_found_right_email"] == 1
    assert far["ever_read_right_email"] == 0
    assert far["ran_out_of_turns"] == 1
    assert far["attempted_answer"] == 0
    assert metrics(answer("I don't know"))["returned_i_dont_know"] == 1
    assert metrics(answer("I don't know"))["attempted_answer"] == 0
    assert metrics(answer("Friday", "m1", "m2", "m1"))["num_sources"] == 2


@pytest.mark.parametrize("text", ["Monday", " monday ", "MONDAY.", "Mon­day".replace("­", "")])
def test_case_white_space_and_a_full_stop_do_not_matter(text: str):
    assert normalised(text) == "monday"


@pytest.mark.parametrize("text", [":", "Thought process:", "Monday or Tuesday", "The answer is Monday", "mondays", ""])
def test_other_texts_are_not_accepted_as_the_answer(text: str):
    assert score(FOUND, READ, answer(text, RIGHT)).metrics["answer_right"] == 0


some_calls = st.lists(
    st.sampled_from([FOUND, MISSED, READ, READ_OTHER, READ_INVALID, UNREADABLE, CUT, UNKNOWN, MISFIT]), max_size=4
)
some_answers = st.none() | st.builds(
    lambda text, sources: answer(text, *sources),
    st.sampled_from(["Monday", "Tuesday", "I don't know"]),
    st.lists(st.sampled_from([RIGHT, "m2"]), max_size=3),
)


@given(some_calls, some_answers)
def test_the_tiers_never_overlap(calls: list[ToolCall], last: ToolCall | None):
    scored = score(*calls, *([] if last is None else [last]))
    if scored.metrics["answer_right"]:
        assert 1.0 <= scored.value <= 1.5
    elif scored.metrics["attempted_answer"]:
        assert -1.0 <= scored.value <= -0.6
    elif last is None and calls and calls[-1].outcome not in (CallOutcome.OK, CallOutcome.TOOL_ERROR):
        assert -2.0 <= scored.value <= -1.5
    else:
        assert 0.0 <= scored.value <= 0.4


def test_an_invalid_ground_truth_is_a_failure():
    with pytest.raises(TypeError, match="must be an object"):
        score(ground_truth=None)  # pyright: ignore[reportArgumentType]


def searched(keywords: list[str], *found: str) -> ToolCall:
    return replace(call("search_emails", found=list(found)), arguments={"keywords": keywords})


@pytest.mark.parametrize(
    ("calls", "value"),
    [
        pytest.param([searched(["Bo", "tea"], RIGHT)], 1.0, id="both named, found alone"),
        pytest.param([searched(["bo", "TEA"], RIGHT)], 1.0, id="whatever the case"),
        pytest.param([searched(["tea"], "m2", RIGHT)], 0.4, id="one named, others found too"),
        pytest.param([searched(["Bo", "Bo"], "m2", RIGHT)], 0.4, id="one named twice"),
        pytest.param([searched(["Bo", "tee"])], 0.4, id="one named, the other spoilt"),
        pytest.param([searched(["Bo", "tea", "day"])], 0.8, id="both named, and something that spoils it"),
        pytest.param([searched(["Bo drinks"], RIGHT)], 0.2, id="found, by other words"),
        pytest.param([searched(["day"])], 0.0, id="neither"),
        pytest.param([searched(["day"]), searched(["Bo", "tea"], RIGHT)], 0.0, id="the first search counts"),
        pytest.param([UNREADABLE], -1.0, id="unreadable"),
        pytest.param([MISFIT], -1.0, id="wrong arguments"),
        pytest.param([], -1.0, id="no call"),
    ],
)
def test_a_search_is_scored_by_its_keywords_and_results(calls: list[ToolCall], value: float):
    scored = score(*calls, turns=1, rule=first_search)
    assert scored.value == pytest.approx(value)
    assert scored.metrics["searched"] == (value >= 0)
    found = calls[0].data.get("found", []) if calls else []
    assert scored.metrics["found_right_email"] == (RIGHT in found)
    assert scored.metrics["found_it_alone"] == (found == [RIGHT])


ALL = {
    "answer": "12 May 2001",
    "aliases": ["May 12, 2001", "2001-05-12"],
    "message_ids": ["m1", "m2"],
    "evidence": "all",
}
ANY = {**ALL, "evidence": "any"}


@pytest.mark.parametrize("given_answer", ["12 may 2001.", "May 12, 2001", "2001-05-12", "12\u00a0May  2001"])
def test_an_alias_of_the_answer_is_right(given_answer: str):
    assert score(answer(given_answer, "m1"), ground_truth=ANY).metrics["answer_correct"] == 1
    assert score(answer(f"not {given_answer}", "m1"), ground_truth=ANY).metrics["answer_correct"] == 0


def test_evidence_is_any_or_all_of_the_mails():
    one = [call("search_emails", found=["m1"]), call("read_email", read="m1"), answer("2001-05-12", "m1")]
    both = [
        *one[:2],
        call("search_emails", found=["m2"]),
        call("read_email", read="m2"),
        answer("2001-05-12", "m2", "m1"),
    ]
    names = ("sources_correct", "ever_found_right_email", "ever_read_right_email", "answer_correct")
    for calls, ground_truth, expected in ((one, ANY, 1), (one, ALL, 0), (both, ANY, 1), (both, ALL, 1)):
        metrics = score(*calls, ground_truth=ground_truth).metrics
        assert [metrics[name] for name in names] == [expected] * 4


@pytest.mark.parametrize("wrong", [{"evidence": "most"}, {"message_ids": []}])
def test_a_ground_truth_that_means_nothing_is_an_error(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="evidence is"):
        score(answer("x"), ground_truth={**ALL, **wrong})


@pytest.mark.parametrize(
    ("calls", "stop", "value"),
    [
        pytest.param([FOUND, READ, answer("Monday", RIGHT)], None, 1.3 + 0.1 + 0.04, id="right, cited"),
        pytest.param([FOUND, READ, answer("Tuesday", RIGHT)], None, -0.6, id="wrong, everything else right"),
        pytest.param([answer("I don't know")], None, 0.1, id="giving up at once earns a tenth"),
        pytest.param([MISSED], StopReason.MAX_TURNS, 0.1, id="out of turns"),
        pytest.param([MISSED], StopReason.ANSWERED, -1.7, id="a turn without a call"),
        pytest.param([UNREADABLE], None, -1.9, id="unreadable"),
        pytest.param([UNKNOWN], None, -1.8, id="unknown tool"),
        pytest.param([MISFIT], None, -1.7, id="wrong arguments"),
        pytest.param([FOUND, READ_INVALID, MISFIT], None, -1.7, id="wrong arguments after an invalid id"),
        pytest.param(
            [FOUND, UNKNOWN, READ, answer("Monday", RIGHT)], None, -1.7, id="a corrected call is not forgiven"
        ),
    ],
)
def test_the_published_value_of_each_case(calls: list[ToolCall], stop: StopReason | None, value: float):
    assert score(*calls, stop=stop, rule=art_e_compat).value == pytest.approx(value)


def test_only_a_right_answer_with_accepted_sources_is_rewarded_behind_the_gate():
    def gated(*sources: str, text: str = "2001-05-12", ground_truth: Mapping[str, Any] = ANY) -> float:
        return score(answer(text, *sources), rule=evidence_gated, ground_truth=ground_truth).value

    assert gated("m1") == gated("m2") == gated("m1", "m9", "m8") == gated("m1", "m2", ground_truth=ALL) == 1
    assert gated() == gated("m9") == gated("m1", text="2001-05-13") == gated("m1", text="I don't know") == 0
    assert gated("m1", ground_truth=ALL) == 0
    assert gated("m1", "m7", "m8", "m9") == 0, "citing everything"
    many = {**ALL, "message_ids": ["a", "b", "c", "d", "e"]}
    assert gated("a", "b", "c", "d", "e", ground_truth=many) == 1


@pytest.mark.parametrize("rule", [art_e, art_e_compat, evidence_gated])
def test_every_reward_reports_the_same_metrics(rule: Rule):
    metrics = score(UNREADABLE, UNKNOWN, MISFIT, READ_INVALID, READ, answer("Monday", RIGHT), rule=rule).metrics
    assert metrics == score(UNREADABLE, UNKNOWN, MISFIT, READ_INVALID, READ, answer("Monday", RIGHT)).metrics
    for name in ("cant_parse_tool_call", "bad_tool_call_name", "bad_tool_call_args", "tool_errors", "answer_correct"):
        assert metrics[name] == 1


@pytest.mark.parametrize("rule", [art_e, art_e_compat, evidence_gated])
def test_a_judge_decides_on_answers_that_are_not_equal(rule: Rule) -> None:
    expected = {**GROUND_TRUTH, "aliases": ["Mon"]}
    calls = (FOUND, READ, answer("on the first day of the week", RIGHT))
    with pytest.raises(VerdictNeeded) as asked:
        score(*calls, rule=rule, ground_truth=expected, verdicts={})
    claim = asked.value.claim
    assert (claim.question, claim.accepted, claim.answer) == (
        "Which day?",
        ("Monday", "Mon"),
        "on the first day of the week",
    )
    right, wrong = (
        score(*calls, rule=rule, ground_truth=expected, verdicts={claim.digest(): verdict}) for verdict in (True, False)
    )
    equal = score(FOUND, READ, answer("mon.", RIGHT), rule=rule, ground_truth=expected, verdicts={})  # not asked
    assert right == equal
    assert wrong.value < right.value
    assert wrong == score(FOUND, READ, answer("Tuesday", RIGHT), rule=rule, ground_truth=expected)


def test_no_answer_and_no_knowledge_are_never_judged() -> None:
    for calls in ((FOUND, READ), (FOUND, READ, answer("I don't know")), ()):
        assert score(*calls, verdicts={}) == score(*calls)
