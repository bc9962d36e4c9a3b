"""Asks a judge every case of the bank and makes the report."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from kestrl._shared.plan.settings.judge import JudgeEntry, RulerEntry
from kestrl.errors import UserInputError
from kestrl_judge.bank.cases import TOLERANCE, BankCase, Scores, all_cases, group_of
from kestrl_judge.bank.claims import RIGHT, WRONG, ClaimCase, all_claims
from kestrl_judge.correctness import build_prompt
from kestrl_judge.ruler.asking import Asker, JudgeCounts
from kestrl_judge.ruler.client import NoScores, NoScoresReason
from kestrl_judge.ruler.journal import Journal
from kestrl_judge.ruler.scorer import prompts
from kestrl_judge.ruler.trajectories import compare

PASSING_SCORE = 0.5
"""Score from which on a judge counts as having accepted an attempt."""
UNUSABLE = {
    NoScoresReason.UNAVAILABLE,
    NoScoresReason.REFUSED,
    NoScoresReason.UNAUTHORIZED,
    NoScoresReason.TIMEOUT,
}
"""Reasons that say nothing about how a judge scores."""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What a judge made of a case."""

    case: BankCase
    scores: Scores | None
    """None if it gave none."""
    problem: str | None
    reason: NoScoresReason | None = None
    """Why it gave no scores."""


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """The verdict of a judge of correctness on a case."""

    case: ClaimCase
    verdict: bool | None
    """None if it gave none."""
    problem: str | None
    reason: NoScoresReason | None = None
    """Why it gave no verdict."""


async def run_bank(ruler: RulerEntry, cases: Sequence[BankCase] | None = None) -> dict[str, Any]:
    """Asks the judge and returns the report as JSON.

    Raises:
        UserInputError: The judge cannot be used: the first case got no reply.
    """
    counts = JudgeCounts()
    asker, salt = Asker(ruler, Journal(None), counts), secrets.token_hex(8)
    try:
        # One case alone: a wrong address or key would fail every case, and look like a bad judge.
        first, *remaining = cases or all_cases()
        outcomes = [await _outcome(asker, ruler, salt, first)]
        if outcomes[0].reason in UNUSABLE:
            raise UserInputError(f"the judge gave no reply to the first case: {outcomes[0].problem}")
        outcomes += await asyncio.gather(*(_outcome(asker, ruler, salt, case) for case in remaining))
    finally:
        await asker.close()
    return report(ruler, outcomes, counts)


async def run_claims(judge: JudgeEntry, cases: Sequence[ClaimCase] | None = None) -> dict[str, Any]:
    """Asks a judge of correctness and returns the report as JSON.

    Raises:
        UserInputError: The judge cannot be used: the first case got no reply.
    """
    counts = JudgeCounts()
    asker, salt = Asker(judge, Journal(None), counts), secrets.token_hex(8)
    try:
        first, *remaining = cases or all_claims()
        outcomes = [await _claim_outcome(asker, salt, first)]
        if outcomes[0].reason in UNUSABLE:
            raise UserInputError(f"the judge gave no reply to the first case: {outcomes[0].problem}")
        outcomes += await asyncio.gather(*(_claim_outcome(asker, salt, case) for case in remaining))
    finally:
        await asker.close()
    checks: dict[str, list[ClaimOutcome]] = {}
    for outcome in outcomes:
        checks.setdefault(outcome.case.check, []).append(outcome)
    entries = [
        {
            "name": name,
            "cases": len(results),
            "failures": _failures((claim_outcome.case.name, claim_outcome.problem) for claim_outcome in results),
        }
        for name, results in checks.items()
    ]
    return _report(judge, entries, verdict_agreement([*checks.get(RIGHT, []), *checks.get(WRONG, [])]), counts)


async def _claim_outcome(asker: Asker, salt: str, case: ClaimCase) -> ClaimOutcome:
    try:
        opinion = await asker.opinion(lambda tokens: build_prompt(case.claim, salt=salt, tokens=tokens), [])
    except NoScores as error:
        return ClaimOutcome(case, None, f"not judged ({error.reason}): {error}", error.reason)
    (grade,) = opinion.grades.values()
    verdict = grade.score == 1.0
    return ClaimOutcome(case, verdict, case.problem(verdict))


def verdict_agreement(outcomes: Sequence[ClaimOutcome]) -> Mapping[str, float] | None:
    """Accuracy on answers that are known to be right or wrong, the share of wrong ones taken for correct, and that of
    right ones taken for wrong. Answers without a verdict are left out.
    """
    pairs = [(outcome.verdict, outcome.case.correct) for outcome in outcomes if outcome.verdict is not None]
    if not pairs:
        return None
    wrong = [verdict for verdict, correct in pairs if not correct]
    right = [verdict for verdict, correct in pairs if correct]
    return {
        "accuracy": fmean(verdict is correct for verdict, correct in pairs),
        "false_positives": fmean(wrong) if wrong else 0.0,
        "false_negatives": fmean(not verdict for verdict in right) if right else 0.0,
    }


async def _outcome(asker: Asker, ruler: RulerEntry, salt: str, case: BankCase) -> CaseOutcome:
    comparison = compare(group_of(case), show_reasoning=ruler.show_reasoning)
    try:
        opinion = await asker.opinion(prompts(comparison, ruler, salt, case.permutation), [])
    except NoScores as error:
        return CaseOutcome(case, None, f"not scored ({error.reason}): {error}", error.reason)
    scores = {label: grade.score for name, grade in opinion.grades.items() for label in opinion.prompt.episodes[name]}
    return CaseOutcome(case, scores, case.problem(scores))


def report(ruler: RulerEntry, outcomes: Sequence[CaseOutcome], counts: JudgeCounts) -> dict[str, Any]:
    """The report: one entry for each check, and numbers of all of them."""
    checks: dict[str, list[CaseOutcome]] = {}
    for outcome in outcomes:
        checks.setdefault(outcome.case.check, []).append(outcome)
    entries = [_entry(name, claim_outcomes) for name, claim_outcomes in checks.items()]
    return _report(ruler, entries, agreement(checks.get("agreement", [])), counts)


def _report(
    judge: JudgeEntry,
    entries: Sequence[Mapping[str, Any]],
    agreement_figures: Mapping[str, float] | None,
    counts: JudgeCounts,
) -> dict[str, Any]:
    return {
        "judges": [model.model for model in judge.judges],
        "passed": all(not entry["failures"] for entry in entries),
        "checks": entries,
        "agreement": agreement_figures,
        "usage": {
            "calls": sum(counts.calls.values()),
            "results": {f"{model} {result}": count for (model, result), count in sorted(counts.calls.items())},
            "tokens": {f"{model} {kind}": count for (model, kind), count in sorted(counts.tokens.items())},
            "cost": sum(counts.cost.values()),
            "seconds": sum(counts.seconds.values()),
        },
    }


def _failures(problems: Iterable[tuple[str, str | None]]) -> list[str]:
    return [f"{name}: {problem}" for name, problem in problems if problem is not None]


def _entry(name: str, outcomes: Sequence[CaseOutcome]) -> dict[str, Any]:
    failures = _failures((outcome.case.name, outcome.problem) for outcome in outcomes)
    entry: dict[str, Any] = {"name": name, "cases": len(outcomes), "failures": failures}
    if name == "permutation":
        spread = largest_spread([outcome.scores for outcome in outcomes if outcome.scores is not None])
        entry["spread"] = spread
        if spread > TOLERANCE:
            failures.append(f"the score of one attempt differs by {spread:g} between orders, more than {TOLERANCE:g}")
    return entry


def largest_spread(orders: Sequence[Scores]) -> float:
    """Largest difference of one attempt's scores between orders."""
    labels: list[str] = list(orders[0]) if orders else []
    return max(
        (max(scores[label] for scores in orders) - min(scores[label] for scores in orders) for label in labels),
        default=0.0,
    )


def agreement(outcomes: Sequence[CaseOutcome]) -> Mapping[str, float] | None:
    """Agreement with the known answers: accuracy and false positives at `PASSING_SCORE`, and Kendall's tau-b within
    groups.
    """
    scored = [(outcome.scores, outcome.case.correct) for outcome in outcomes if outcome.scores is not None]
    if not scored:
        return None
    accepted = [(scores[label] >= PASSING_SCORE, label in correct) for scores, correct in scored for label in scores]
    false = [accept for accept, is_correct in accepted if not is_correct]
    return {
        "accuracy": fmean(accept == is_correct for accept, is_correct in accepted),
        "false_positives": fmean(false) if false else 0.0,
        "kendall_tau": fmean(
            kendall([(scores[label], float(label in correct)) for label in scores]) for scores, correct in scored
        ),
    }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of two rankings; 0 if one of them is constant."""
    agree = first_ties = second_ties = total = 0
    for (a, x), (b, y) in combinations(pairs, 2):
        total += 1
        first_ties += a == b
        second_ties += x == y
        agree += (a > b) * (x > y) + (a < b) * (x < y) - (a > b) * (x < y) - (a < b) * (x > y)
    scale = ((total - first_ties) * (total - second_ties)) ** 0.5
    return agree / scale if scale else 0.0
