"""A number of engines, or a range that others move it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.spec import read_job
from kestrl._shared.spec.crd import crd
from kestrl._shared.spec.problems import ProblemsError

QUICKSTART = Path(__file__).parents[4] / "examples" / "email-search" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "bounds", "written"),
    [
        ("3", (3, 3), 3),
        ("{min: 2, max: 8}", (2, 8), {"min": 2, "max": 8}),
        ("{min: 2, max: 2}", (2, 2), 2),
    ],
)
def test_a_number_or_a_range(text: str, bounds: tuple[int, int], written: object) -> None:
    inference = read_job(QUICKSTART, (f"inference.replicas={text}",)).spec.inference
    assert (inference.replicas.min, inference.replicas.max) == bounds
    assert inference.replicas.fixed is (bounds[0] == bounds[1])
    assert inference.model_dump(by_alias=True)["replicas"] == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "spec.inference.replicas: must be a number from 1 to 256, or a range such as {min: 1, max: 4} (is 0)"),
        ("true", "spec.inference.replicas: must be a number from 1 to 256"),
        ("'2'", "spec.inference.replicas: must be a number from 1 to 256"),
        ("[1, 2]", "spec.inference.replicas: must be a number from 1 to 256"),
        ("{min: 4, max: 2}", "spec.inference.replicas: max (2) is below min (4); raise it"),
        ("{min: 0, max: 2}", "spec.inference.replicas.min: Input should be greater than or equal to 1"),
        ("{min: 1}", "spec.inference.replicas.max: is required; add it"),
        ("{min: 1, max: 2, most: 3}", "spec.inference.replicas.most: unknown field"),
    ],
)
def test_what_is_neither_is_one_problem(text: str, message: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        read_job(QUICKSTART, (f"inference.replicas={text}",))
    (problem,) = caught.value.problems
    assert str(problem).startswith(message)


def test_the_crd_takes_both_and_bounds_the_number() -> None:
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    field = schema["properties"]["inference"]["properties"]["replicas"]
    assert field.pop("description").startswith("Number of engines")
    assert field == {"x-kubernetes-preserve-unknown-fields": True, "minimum": 1, "maximum": 256, "default": 1}
