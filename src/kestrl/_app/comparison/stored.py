"""Stored evaluations as `kestrl compare` names them: a run, or an evaluation of a run by its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kestrl._app.episodes.places import EpisodePlace, find_place
from kestrl._app.episodes.reading import Batch, batches, evaluated_groups
from kestrl._app.local.comparison import PolicyEvaluation
from kestrl._app.local.rundir import RunDir
from kestrl._app.local.uncertainty import values_of
from kestrl.episode import Group, PolicyVersion, Purpose
from kestrl.errors import UserInputError
from kestrl.runstate.sampling import GREEDY, EvaluationSampling


@dataclass(frozen=True, slots=True)
class EvaluationName:
    """A stored evaluation as a person names it: `RUN` or `RUN@STEP`."""

    run: str | None
    """Run id, folder or address; None for the latest run."""
    step: int | None
    """Step after which the policy was evaluated; None for the last evaluation."""

    @staticmethod
    def parse(text: str | None) -> EvaluationName:
        """Reads `RUN` or `RUN@STEP`; an `@` that no number follows belongs to the name."""
        run, separator, step = (text or "").rpartition("@")
        if not separator or not (step.isascii() and step.isdigit()):
            return EvaluationName(text, None)
        return EvaluationName(run or None, int(step))


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """A policy's evaluation, with the run whose job made it."""

    evaluation: PolicyEvaluation
    run: RunDir | None
    """None for an address."""


def read_evaluation(runs: Path, name: EvaluationName, *, first: bool = False) -> StoredEvaluation:
    """A stored evaluation.

    Args:
        runs: Folder that contains the runs.
        name: The evaluation.
        first: Take the run's first evaluation where the name has no step, instead of its last.

    Raises:
        UserInputError: There is no such run or evaluation.
    """
    place = find_place(runs, name.run)
    batch = _batch(place, name, first=first)
    label = f"{_run_label(place, name)}@{batch.step}"
    groups, run = evaluated_groups(place.store, batch.step), place.run
    sampling = _sampling(run, groups)
    evaluation = PolicyEvaluation(
        label=label,
        policy=_policy(groups),
        means={name: fmean(by_question.values()) for name, by_question in values_of(groups, sampling.samples).items()},
        groups=groups,
        folder=place.store.uri if run is None else str(run.path),
        sampling=sampling,
        failures=_failures(groups),
    )
    return StoredEvaluation(evaluation, run)


def check_same_questions(one: PolicyEvaluation, other: PolicyEvaluation) -> None:
    """Raises UserInputError where a question of one evaluation is another text in the other: they read different data,
    so that no question can be paired.
    """
    questions = {group.scenario.ordinal: group.scenario for group in one.groups}
    for group in other.groups:
        scenario, counterpart = group.scenario, questions.get(group.scenario.ordinal)
        if counterpart is not None and (
            list(counterpart.messages) != list(scenario.messages) or counterpart.ground_truth != scenario.ground_truth
        ):
            raise UserInputError(
                f"{one.label} and {other.label} were evaluated on different data: question {scenario.ordinal} is "
                f"{counterpart.id!r} in one and {scenario.id!r}, another text, in the other; `kestrl eval` evaluates "
                "policies on the same data"
            )


def _batch(place: EpisodePlace, name: EvaluationName, *, first: bool) -> Batch:
    stored = batches(place.store, Purpose.EVALUATION, None)
    label = _run_label(place, name)
    if not stored:
        raise UserInputError(
            f"{label} has no stored evaluation: its job has no spec.data.validation, or nothing was evaluated yet; "
            "`kestrl eval` evaluates a policy of a run"
        )
    if name.step is None:
        return stored[0 if first else -1]
    for batch in stored:
        if batch.step == name.step:
            return batch
    steps = ", ".join(str(batch.step) for batch in stored)
    raise UserInputError(f"{label} has no stored evaluation of step {name.step} (there are: {steps})")


def _run_label(place: EpisodePlace, name: EvaluationName) -> str:
    return place.run.id if place.run is not None else str(name.run)


def _policy(groups: Sequence[Group]) -> str:
    """Names of the policies that sampled the episodes."""
    return ", ".join(sorted({_version(episode.policy) for group in groups for episode in group.episodes}))


def _version(policy: PolicyVersion | None) -> str:
    return "base" if policy is None else policy.name


def _sampling(run: RunDir | None, groups: Sequence[Group]) -> EvaluationSampling:
    """How a run samples evaluations; for an address only the number of samples is known."""
    summary = None if run is None else run.summary()
    if summary is not None and summary.sampling is not None:
        return summary.sampling
    samples = max((len(group.episodes) for group in groups), default=1)
    return GREEDY.model_copy(update={"samples": max(1, samples)})


def _failures(groups: Sequence[Group]) -> dict[str, int]:
    failures = (episode.failure for group in groups for episode in group.episodes if episode.failure is not None)
    return dict(Counter(f"{failure.boundary}/{failure.code}" for failure in failures))
