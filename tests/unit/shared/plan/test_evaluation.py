"""How the evaluations of a job sample."""

from __future__ import annotations

import pytest
from tests.unit.shared.plan.test_plan import job_with

from kestrl._shared.plan.evaluation import evaluation_sampling


@pytest.mark.parametrize(
    ("evaluation", "temperature"),
    [
        ("{}", 0.0),
        ("{samples: 1, topP: 1, topK: 0}", 0.0),
        ("{samples: 2}", 0.7),
        ("{topP: 0.9}", 0.7),
        ("{topK: 1}", 0.7),
        ("{samples: 2, temperature: 0.3}", 0.3),
        ("{temperature: 0.3}", 0.3),
    ],
)
def test_only_what_needs_samples_is_sampled_at_the_temperature_of_training(evaluation: str, temperature: float) -> None:
    spec = job_with("sampling.temperature=0.7", f"evaluation={evaluation}").spec
    assert evaluation_sampling(spec).temperature == temperature
