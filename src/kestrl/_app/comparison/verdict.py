"""Judges runs by a threshold: the plateau at the end of each run's evaluations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kestrl._app.local.uncertainty import Paired, Values, paired, standard_error
from kestrl._shared.spec.threshold import ThresholdSpec
from kestrl.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCurve:
    """Evaluations of a run."""

    run: str
    seed: int
    evaluations: Sequence[Mapping[str, Any]]
    """As in `summary.json`: `step` and means, in order of steps."""
    values: Mapping[int, Values] = field(default_factory=dict[int, Values])
    """The metric of each question in the evaluation of a step; empty where episodes are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedVerdict:
    """The plateau of one run."""

    run: str
    seed: int
    before: float | None
    """Before training."""
    values: tuple[float, ...]
    """The last evaluations."""
    plateau: float
    """Their mean."""
    standard_error: float | None
    """Standard error of the plateau over the questions; None without stored episodes."""
    rise: Paired | None
    """From the evaluation before training to the plateau, on the same questions; None without stored episodes."""
    fall: float
    """How far the least-squares line through them falls; negative if it rises."""
    problems: tuple[str, ...]
    """Why this run fails on its own, whatever the others reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdVerdict:
    """The result of all runs."""

    seeds: tuple[SeedVerdict, ...]
    mean: float
    """Mean of the plateaus."""
    standard_error: float | None
    """Standard error of the mean: over the seeds, or over the questions of a single one."""
    problems: tuple[str, ...]
    """Why the threshold is not reached; empty if it is."""

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(spec: ThresholdSpec, curves: Sequence[EvaluationCurve]) -> ThresholdVerdict:
    """The verdict on runs.

    Raises:
        UserInputError: A run has too few evaluations, or none with the metric.
    """
    seeds = tuple(_judge_seed(spec, curve) for curve in curves)
    mean = fmean(seed.plateau for seed in seeds)
    problems = [f"{seed.run}: {problem}" for seed in seeds for problem in seed.problems]
    if mean < spec.threshold:
        problems.insert(0, f"the mean plateau of {spec.metric} is {mean:.4f}, below {spec.threshold:g}")
    error = standard_error({seed.seed: seed.plateau for seed in seeds})
    if len(seeds) == 1:
        error = seeds[0].standard_error
    return ThresholdVerdict(seeds=seeds, mean=mean, standard_error=error, problems=tuple(problems))


def _judge_seed(spec: ThresholdSpec, curve: EvaluationCurve) -> SeedVerdict:
    trained = [evaluation for evaluation in curve.evaluations if evaluation["step"] > 0]
    width = spec.plateau.evaluations
    if len(trained) < width:
        raise UserInputError(
            f"spec.plateau.evaluations: {curve.run} has {len(trained)} evaluations after a step, not {width}; lower "
            "schedule.evalEvery of the job or this number"
        )
    window = trained[-width:]
    values = tuple(_value(evaluation, spec.metric, curve.run) for evaluation in window)
    first = next((evaluation for evaluation in curve.evaluations if evaluation["step"] == 0), None)
    before = None if first is None else _value(first, spec.metric, curve.run)
    by_question = _over_questions([curve.values.get(int(evaluation["step"]), {}) for evaluation in window])
    plateau, fall = fmean(values), -_rise([float(evaluation["step"]) for evaluation in window], values)
    return SeedVerdict(
        run=curve.run,
        seed=curve.seed,
        before=before,
        values=values,
        plateau=plateau,
        standard_error=standard_error(by_question),
        rise=paired(curve.values.get(0, {}), by_question),
        fall=fall,
        problems=tuple(_problems(spec, before, plateau, fall, window)),
    )


def _over_questions(evaluations: Sequence[Values]) -> dict[int, float]:
    """Each question's mean over the evaluations that answered it."""
    questions = sorted({question for values in evaluations for question in values})
    return {question: fmean(values[question] for values in evaluations if question in values) for question in questions}


def _problems(
    spec: ThresholdSpec, before: float | None, plateau: float, fall: float, window: Sequence[Mapping[str, Any]]
) -> list[str]:
    problems: list[str] = []
    if spec.plateau.max_fall is not None and fall > spec.plateau.max_fall:
        problems.append(f"{spec.metric} falls by {fall:.4f} over the plateau, more than {spec.plateau.max_fall:g}")
    if spec.min_rise is not None and (before is None or plateau - before < spec.min_rise):
        change = "was not evaluated before training" if before is None else f"rose by {plateau - before:.4f}"
        problems.append(f"{spec.metric} {change}, and must rise by {spec.min_rise:g}")
    for evaluation in window:
        share = evaluation.get("exceptions", 0.0) / max(1.0, evaluation.get("episodes", 1.0))
        if share > spec.max_failed:
            problems.append(
                f"step {evaluation['step']:.0f}: {share:.1%} of the episodes failed, more than {spec.max_failed:.1%}"
            )
    return problems


def _value(means: Mapping[str, Any], metric: str, run: str) -> float:
    value = means.get(metric)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    metric_names = ", ".join(sorted(name for name in means if name != "step"))
    raise UserInputError(
        f"spec.metric: {run} has no {metric!r} in its evaluation of step {means['step']} (there are: {metric_names})"
    )


def _rise(steps: Sequence[float], values: Sequence[float]) -> float:
    """Difference between last and first step of the least-squares line."""
    middle, mean = fmean(steps), fmean(values)
    spread = sum((step - middle) ** 2 for step in steps)
    if spread == 0:
        return 0.0
    slope = sum((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread
    return slope * (steps[-1] - steps[0])
