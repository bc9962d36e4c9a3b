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
class Curve:
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
class Verdict:
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


def judge(spec: ThresholdSpec, curves: Sequence[Curve]) -> Verdict:
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
    return Verdict(seeds=seeds, mean=mean, standard_error=error, problems=tuple(problems))


def _judge_seed(spec: ThresholdSpec, curve: Curve) -> SeedVerdict:
    trained = [each for each in curve.evaluations if each["step"] > 0]
    wanted = spec.plateau.evaluations
    if len(trained) < wanted:
        raise UserInputError(
            f"spec.plateau.evaluations: {curve.run} has {len(trained)} evaluations after a step, not {wanted}; lower "
            "schedule.evalEvery of the job or this number"
        )
    window = trained[-wanted:]
    values = tuple(_value(each, spec.metric, curve.run) for each in window)
    first = next((each for each in curve.evaluations if each["step"] == 0), None)
    before = None if first is None else _value(first, spec.metric, curve.run)
    by_question = _over_questions([curve.values.get(int(each["step"]), {}) for each in window])
    plateau, fall = fmean(values), -_rise([float(each["step"]) for each in window], values)
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
    questions = sorted({question for each in evaluations for question in each})
    return {question: fmean(each[question] for each in evaluations if question in each) for question in questions}


def _problems(
    spec: ThresholdSpec, before: float | None, plateau: float, fall: float, window: Sequence[Mapping[str, Any]]
) -> list[str]:
    found: list[str] = []
    if spec.plateau.max_fall is not None and fall > spec.plateau.max_fall:
        found.append(f"{spec.metric} falls by {fall:.4f} over the plateau, more than {spec.plateau.max_fall:g}")
    if spec.min_rise is not None and (before is None or plateau - before < spec.min_rise):
        begun = "was not evaluated before training" if before is None else f"rose by {plateau - before:.4f}"
        found.append(f"{spec.metric} {begun}, and must rise by {spec.min_rise:g}")
    for each in window:
        share = each.get("exceptions", 0.0) / max(1.0, each.get("episodes", 1.0))
        if share > spec.max_failed:
            found.append(
                f"step {each['step']:.0f}: {share:.1%} of the episodes failed, more than {spec.max_failed:.1%}"
            )
    return found


def _value(means: Mapping[str, Any], metric: str, run: str) -> float:
    value = means.get(metric)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    known = ", ".join(sorted(name for name in means if name != "step"))
    raise UserInputError(
        f"spec.metric: {run} has no {metric!r} in its evaluation of step {means['step']} (there are: {known})"
    )


def _rise(steps: Sequence[float], values: Sequence[float]) -> float:
    """Difference between last and first step of the least-squares line."""
    middle, mean = fmean(steps), fmean(values)
    spread = sum((step - middle) ** 2 for step in steps)
    if spread == 0:
        return 0.0
    slope = sum((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread
    return slope * (steps[-1] - steps[0])
