"""What a probe proves."""

from __future__ import annotations

import re

import pytest

from kestrl.storage import Probe
from kestrl.storage.adapters import largest_gap
from kestrl_inference.proof import compare

BOUND = 1e-3


def probe(effect: float) -> Probe:
    """A version whose log-probs differ from the base's by `effect` everywhere."""
    base = (-1.0, -2.0, -3.0)
    return Probe(token_ids=(1, 2, 3, 4), logprobs=tuple(value + effect for value in base), base_logprobs=base)


def answered(*differences: float) -> list[float]:
    """An engine's answer, as differences from the base's log-probs."""
    return [value + difference for value, difference in zip((-1.0, -2.0, -3.0), differences, strict=True)]


@pytest.mark.parametrize(
    ("effect", "answer", "code"),
    [
        (0.5, answered(0.5, 0.5, 0.5), None),
        (0.5, answered(0.5005, 0.4995, 0.5), None),
        (0.5, answered(0.0, 0.0, 0.0), "adapter_not_applied"),
        (0.5, answered(0.0004, 0.0, -0.0004), "adapter_not_applied"),
        (0.5, answered(0.5, 0.5, 0.52), "probe_failed"),
        (0.5, answered(0.5, 0.5, 0.0), "probe_failed"),
        (0.5, answered(0.25, 0.25, 0.25), "probe_failed"),
        (0.5, answered(-3.0, 2.0, 1.0), "probe_failed"),
        (0.0, answered(0.0, 0.0, 0.0), None),
        (0.0, answered(0.0004, 0.0, 0.0), None),
        (0.0, answered(0.1, 0.0, 0.0), "probe_failed"),
        # Weaker than the bound: the base's answer is within it, and is caught all the same.
        (5e-4, answered(5e-4, 5e-4, 5e-4), None),
        (5e-4, answered(0.0, 0.0, 0.0), "adapter_not_applied"),
        (5e-4, answered(1e-5, -1e-5, 1e-5), "adapter_not_applied"),
        # Weaker than the engine's rounding: the versions cannot be distinguished, so nothing is refused.
        (1e-6, answered(4e-6, -4e-6, 2e-6), None),
        (1e-6, answered(-4e-6, 4e-6, -4e-6), None),
    ],
    ids=[
        "exact", "within the bound", "base", "nearly base", "one token off", "one token as the base", "half applied",
        "something else", "step 0", "step 0 with rounding", "step 0, something else", "weak and applied",
        "weak and not applied", "weak and not applied, with rounding", "below rounding",
        "below rounding, nearer to base",
    ],
)  # fmt: skip
def test_the_verdict(effect: float, answer: list[float], code: str | None) -> None:
    failure = compare("job.1", "engine-0", probe(effect), answer, BOUND).failure
    assert (failure.code if failure else None) == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (answered(0.5, 0.5, 0.5), None),
        (answered(0.5004, 0.4996, 0.5), "other_version"),
        (answered(0.50019, 0.49985, 0.50002), None),
        (answered(0.5004, 0.4995, 0.5004), None),
        (answered(0.7, 0.5, 0.5), "other_version"),
        (answered(0.7, 0.5, 0.6), "probe_failed"),
        (answered(0.0, 0.0, 0.0), "adapter_not_applied"),
    ],
    ids=["exact", "the one before, within the bound", "rounding", "neither", "another", "nearly another", "base"],
)
def test_another_version_in_the_engine_is_distinguished(answer: list[float], code: str | None) -> None:
    before = Probe(
        token_ids=(1, 2, 3, 4), logprobs=tuple(answered(0.5004, 0.4996, 0.5)), base_logprobs=(-1.0, -2.0, -3.0)
    )
    far = Probe(token_ids=(1, 2, 3, 4), logprobs=tuple(answered(0.7, 0.5, 0.5)), base_logprobs=(-1.0, -2.0, -3.0))
    of_other_ids = Probe(
        token_ids=(9, 2, 3, 4), logprobs=tuple(answered(0.0, 0.0, 0.0)), base_logprobs=(-1.0, -2.0, -3.0)
    )
    others = {"job.1": before, "job.2": far, "job.3": of_other_ids}
    failure = compare("job.4", "engine-0", probe(0.5), answer, BOUND, others).failure
    assert (failure.code if failure else None) == code
    if code == "other_version":
        assert failure is not None
        assert re.search(r"it answers as job\.[12] does", failure.message)


def test_a_failure_names_engine_version_and_numbers() -> None:
    verdict = compare("job.1.abc", "engine-0", probe(0.5), answered(0, 0, 0), BOUND)
    assert verdict.gap == pytest.approx(0.5)
    assert str(verdict.failure) == (
        "[engine/adapter_not_applied] engine-0 does not serve job.1.abc: it answers as the base model does "
        "(probe gap 0.5, bound 0.001)"
    )


def test_the_gap_is_the_largest_in_either_direction() -> None:
    assert largest_gap([0.0, -2.0, 1.0], [0.5, -1.0, 1.0]) == 1.0


def test_sequences_of_two_lengths_are_never_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        largest_gap([0.0, 1.0], [0.0])
