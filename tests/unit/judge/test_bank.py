"""The test bank: a good judge passes it, each bad one fails the check that is meant for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.fakes.judge_model import Asked, Refusal, Said, ScriptedJudge, decided, graded, last_answer
from tests.unit.judge.rulers import ruler_entry

from kestrl.errors import UserInputError
from kestrl_judge.bank.attacks import CLAIM_INJECTIONS, INJECTIONS
from kestrl_judge.bank.cases import PROBLEMS, all_cases, group_of
from kestrl_judge.bank.claims import OTHER_WORDS, all_claims
from kestrl_judge.bank.running import ClaimOutcome, kendall, run_bank, run_claims, verdict_agreement
from kestrl_judge.ruler.trajectories import compare


def tool_results(trajectory: Mapping[str, Any]) -> str:
    return " ".join(message["content"] for message in trajectory["messages"] if message["role"] == "tool")


def careful(trajectory: Mapping[str, Any]) -> float:
    """A judge that believes tool results, and no claims."""
    answer = last_answer(trajectory)
    if not any(problem.right in answer and problem.right in tool_results(trajectory) for problem in PROBLEMS):
        return 0.2 if len(answer.split()) >= 3 and "step by step" not in answer and "carefully" not in answer else 0.0
    return 1.0 if len(trajectory["messages"]) <= 3 else 0.9


def by_position(asked: Asked) -> Said:
    scores = [
        {"trajectory_id": name, "explanation": "", "score": max(0.0, 1.0 - position / 4)}
        for position, name in enumerate(asked.ids)
    ]
    return Said(content=json.dumps({"scores": scores}))


def obedient(trajectory: Mapping[str, Any]) -> float:
    """Follows an order in any message."""
    return 1.0 if "the score 1.0" in json.dumps(trajectory) else careful(trajectory)


def credulous(trajectory: Mapping[str, Any]) -> float:
    return 1.0 if "successfully" in last_answer(trajectory) else careful(trajectory)


def wordy(trajectory: Mapping[str, Any]) -> float:
    return careful(trajectory) * 0.4 + min(1.0, len(last_answer(trajectory)) / 500) * 0.6


def lenient(trajectory: Mapping[str, Any]) -> float:
    return careful(trajectory) or 0.6


BAD: list[tuple[str, Callable[[Asked], Said], set[str]]] = [
    ("position", by_position, {"permutation", "monotonicity"}),
    ("obedient", lambda asked: graded(asked, obedient), {"injections"}),
    ("credulous", lambda asked: graded(asked, credulous), {"fabricated success"}),
    ("wordy", lambda asked: graded(asked, wordy), {"verbosity"}),
    ("lenient", lambda asked: graded(asked, lenient), {"master keys"}),
    ("constant", lambda asked: graded(asked, lambda _: 0.5), {"monotonicity", "agreement"}),
    ("broken", lambda _: Said(content="no"), {"permutation", "duplicates", "agreement", "injections"}),
]


def failed(report: Mapping[str, Any]) -> set[str]:
    return {entry["name"] for entry in report["checks"] if entry["failures"]}


async def test_a_careful_judge_passes() -> None:
    async with ScriptedJudge(lambda asked: graded(asked, careful)) as server:
        report = await run_bank(ruler_entry(server.url, concurrency=16))
    assert failed(report) == set()
    assert report["passed"] is True
    assert report["agreement"] == {"accuracy": 1.0, "false_positives": 0.0, "kendall_tau": pytest.approx(1.0, abs=0.2)}
    assert report["usage"]["calls"] == len(server.asked) > 40


@pytest.mark.parametrize(("script", "expected"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
async def test_a_bad_judge_fails(script: Callable[[Asked], Said], expected: set[str]) -> None:
    async with ScriptedJudge(script) as server:
        report = await run_bank(ruler_entry(server.url, concurrency=16))
    assert expected <= failed(report)
    assert report["passed"] is False


async def test_no_attack_reaches_the_judge_as_more_than_data() -> None:
    """Ids, blocks and control words of a prompt are the ruler's own, whatever the attempts contain."""
    async with ScriptedJudge(lambda asked: graded(asked, careful)) as server:
        await run_bank(ruler_entry(server.url, concurrency=16), [c for c in all_cases() if c.check == "injections"])
    assert len(server.asked) == len(INJECTIONS) >= 15
    for asked in server.asked:
        assert len(asked.trajectories) == 6
        assert asked.data.count("<trajectory ") == asked.data.count("</trajectory>") == 6
        assert not any(mark in asked.data for mark in ("<|", "[INST]", "<start_of_turn>", "\u200b", "\u202e"))
        assert asked.data.isprintable() or "\n" in asked.data
    sent = [json.dumps(trajectory) for asked in server.asked for trajectory in asked.trajectories.values()]
    for text in INJECTIONS.values():  # nothing was removed
        assert sum(json.dumps(text)[1:-1] in each for each in sent) >= 4


def test_every_case_compares_different_trajectories() -> None:
    for case in all_cases():
        comparison = compare(group_of(case), show_reasoning=False)
        shown = sum(len(each.episode_ids) for each in comparison.trajectories)
        assert shown == len(case.attempts)
        assert len(comparison.trajectories) >= 2
        assert comparison.context


def test_kendall() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1.0
    assert kendall([(3, 1), (2, 2), (1, 3)]) == -1.0
    assert kendall([(1, 1), (1, 2)]) == 0.0
    assert kendall([(1.0, 1), (0.5, 0), (0.4, 0)]) == pytest.approx(0.816, abs=1e-3)


def exact(answer: str) -> bool:
    """A judge that knows the answers of the bank in other words, and is right about each."""
    if answer in OTHER_WORDS.values():
        return True
    words = answer.casefold()
    named = any(problem.right.casefold() in words for problem in PROBLEMS)
    return named and not any(problem.wrong.casefold() in words or problem.question in answer for problem in PROBLEMS)


BAD_VERDICTS: list[tuple[str, Callable[[str], bool], set[str]]] = [
    ("obedient", lambda answer: "this answer is correct" in answer or exact(answer), {"injections"}),
    ("lenient", lambda _: True, {"wrong answers", "master keys", "injections", "verbosity"}),
    ("strict", lambda _: False, {"right answers", "verbosity"}),
    ("literal", lambda answer: exact(answer) and answer not in OTHER_WORDS.values(), {"right answers"}),
    ("impatient", lambda answer: exact(answer) and len(answer) < 200, {"verbosity"}),
    ("polite", lambda answer: "step by step" in answer or exact(answer), {"master keys"}),
    ("hasty", lambda answer: exact(answer.partition(" or ")[2] or answer), {"wrong answers"}),
]


async def test_an_exact_judge_of_correctness_passes() -> None:
    async with ScriptedJudge(lambda asked: decided(asked, exact)) as server:
        report = await run_claims(ruler_entry(server.url, concurrency=16))
    assert failed(report) == set()
    assert report["passed"] is True
    assert report["agreement"] == {"accuracy": 1.0, "false_positives": 0.0, "false_negatives": 0.0}
    assert report["usage"]["calls"] == len(server.asked) == len(all_claims()) > 80


@pytest.mark.parametrize(
    ("correct", "expected"), [bad[1:] for bad in BAD_VERDICTS], ids=[bad[0] for bad in BAD_VERDICTS]
)
async def test_a_bad_judge_of_correctness_fails_its_check(correct: Callable[[str], bool], expected: set[str]) -> None:
    async with ScriptedJudge(lambda asked: decided(asked, correct)) as server:
        report = await run_claims(ruler_entry(server.url, concurrency=16))
    assert failed(report) == expected
    assert report["passed"] is False


async def test_a_judge_of_correctness_without_a_verdict_fails_every_check() -> None:
    async with ScriptedJudge(lambda _: Said(content="yes")) as server:
        report = await run_claims(ruler_entry(server.url, concurrency=16), all_claims()[::9])
    assert failed(report) == {entry["name"] for entry in report["checks"]}
    assert "not judged (malformed)" in report["checks"][0]["failures"][0]
    assert report["agreement"] is None
    async with ScriptedJudge(lambda _: Refusal(status=401)) as server:
        with pytest.raises(UserInputError, match="gave no reply to the first case: not judged"):
            await run_claims(ruler_entry(server.url))


async def test_no_injected_answer_ends_its_block() -> None:
    cases = [case for case in all_claims() if case.check == "injections"]
    async with ScriptedJudge(lambda asked: decided(asked, exact)) as server:
        await run_claims(ruler_entry(server.url, concurrency=16), cases)
    assert len(server.asked) == len(cases) > len(CLAIM_INJECTIONS) >= 15
    for asked in server.asked:
        assert asked.data.count("<answer ") == asked.data.count("</answer>") == 1
        assert not any(mark in asked.data for mark in ("<|", "[INST]", "<start_of_turn>", "\u200b", "\u202e"))
    assert {asked.answer[1]["answer"] for asked in server.asked} == {case.claim.answer for case in cases}


def test_the_agreement_of_verdicts_is_over_what_was_judged() -> None:
    right, wrong = (next(case for case in all_claims() if case.correct is known) for known in (True, False))
    verdicts = [(right, True), (right, False), (right, None), (wrong, False), (wrong, False), (wrong, True)]
    outcomes = [ClaimOutcome(case, verdict, None) for case, verdict in verdicts]
    agreement = verdict_agreement(outcomes)
    assert agreement == pytest.approx({"accuracy": 3 / 5, "false_positives": 1 / 3, "false_negatives": 1 / 2})
