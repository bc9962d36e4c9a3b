"""The summary of an evaluation: means over what was scored, failures by boundary and in no mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kestrl.episode import PROMPT_TOO_LONG, Episode, Group
from kestrl.errors import EngineFailure, Failure, JudgeFailure, UserInputError
from kestrl.testing.attempts import make_attempt
from kestrl_learner.dispatch.evaluate import EvaluationFailed, summarise
from kestrl_learner.progress.progress import Progress


def group(reward: float | None = None, failure: Failure | None = None, **metrics: float) -> Group:
    attempt = make_attempt("72")
    episode: Episode = replace(attempt.episode, reward=reward, failure=failure, metrics=metrics)
    return Group(id="g", scenario=attempt.scenario, episodes=(episode,))


def progress() -> Progress:
    return Progress(engines=1, episodes_per_step=1)


def test_failures_are_counted_by_boundary_and_averaged_nowhere():
    groups = [
        group(1.0, correct=1.0),
        group(0.0, correct=0.0, partial=3.0),
        group(failure=EngineFailure("gone").failure()),
        group(failure=EngineFailure("gone").failure()),
        group(failure=JudgeFailure("no").failure()),
        group(failure=UserInputError("long", code=PROMPT_TOO_LONG).failure()),
    ]
    means = summarise(groups, 7, progress())  # a group of the seven failed as a whole
    assert (means["reward"], means["correct"], means["partial"]) == (0.5, 0.5, 3.0)
    assert (means["episodes"], means["exceptions"]) == (6.0, 4.0)
    assert (means["exceptions_engine"], means["exceptions_judge"]) == (2.0, 1.0)


def test_an_evaluation_without_a_score_fails():
    with pytest.raises(EvaluationFailed, match="none of 1 episodes was scored"):
        summarise([group(failure=EngineFailure("gone").failure())], 1, progress())
