"""The scorers of a job, in the order in which their rewards are combined."""

from __future__ import annotations

from kestrl._shared.plan.settings.judge import JudgeSettings, RulerEntry
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl_judge.correctness import CorrectnessJudge
from kestrl_judge.ruler.asking import JudgeCounts
from kestrl_judge.ruler.scorer import RulerScorer
from kestrl_judge.rules import RuleScorer, rule_scorers
from kestrl_judge.scoring import Scorer


def make_scorers(settings: JudgeSettings) -> list[Scorer]:
    """All scorers: the rules, then the ruler.

    Raises:
        UserInputError: A rule is listed twice.
    """
    counts = JudgeCounts()
    _observe(counts)
    correctness = None
    if settings.correctness is not None:
        correctness = CorrectnessJudge(
            settings.correctness, salt=settings.run, state_dir=settings.state_dir, counts=counts
        )
    rules = rule_scorers(settings, correctness)
    observe(Metric.REWARD_RESTARTS, lambda: {rule.name: rule.restarts for rule in rules})
    if settings.ruler is None:
        return [*rules]
    entry = _with_component(settings.ruler, rules)
    ruler = RulerScorer(entry, salt=settings.run, state_dir=settings.state_dir, counts=counts)
    return [*rules, ruler]


def _with_component(ruler: RulerEntry, rules: list[RuleScorer]) -> RulerEntry:
    """The ruler with the name of the component in place of the rule that gates it."""
    component = next((rule.name for rule in rules if rule.rule == ruler.gate), None)
    return ruler.model_copy(update={"gate": component})


def _observe(counts: JudgeCounts) -> None:
    observe(Metric.JUDGE_CALLS, lambda: {key: float(count) for key, count in counts.calls.items()})
    observe(Metric.JUDGE_TOKENS, lambda: {key: float(count) for key, count in counts.tokens.items()})
    observe(Metric.JUDGE_COST, lambda: dict(counts.cost))
    observe(Metric.JUDGE_SECONDS, lambda: dict(counts.seconds))
    observe(Metric.JUDGE_UNSCORED, lambda: {reason: float(count) for reason, count in counts.unscored.items()})
    observe(Metric.JUDGE_SKIPPED, lambda: counts.skipped)
