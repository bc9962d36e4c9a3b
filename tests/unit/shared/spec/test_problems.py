"""The problems of a manifest: each is reported once, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.shared.spec.test_job import refused

from kestrl._shared.spec import ProblemsError
from kestrl._shared.spec.load import file_kind
from kestrl._shared.spec.threshold import parse_threshold


def test_a_required_field_in_another_spelling_is_one_problem() -> None:
    assert refused("tools=[{use: 'a:b', sandbox: {claim: {warm_pool: a, secretRef: {name: s}}}}]") == [
        "spec.tools[0].sandbox.claim.warm_pool: unknown field; did you mean warmPool?"
    ]


def test_what_an_entry_does_not_take_comes_before_what_does_not_fit_it() -> None:
    problems = refused("algorithm.loss=dppo_tv", "algorithm.lossConfig={penalty: -1, zeal: 1}")
    assert [problem.partition(":")[0] for problem in problems] == [
        "spec.algorithm.lossConfig.zeal",
        "spec.algorithm.lossConfig.penalty",
    ]


def threshold(**spec: Any) -> dict[str, Any]:
    published = {"value": 0.5, "setting": "a run", "source": "a page"}
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "Threshold",
        "metadata": {"name": "mine"},
        "spec": {
            "job": "job.yaml",
            "metric": "reward",
            "threshold": 0.5,
            "template": "chatml",
            "published": published,
            **spec,
        },
    }


def test_a_threshold_names_each_seed_once() -> None:
    assert parse_threshold(threshold(seeds=[1, 2])).spec.seeds == [1, 2]
    with pytest.raises(ProblemsError, match="seeds: holds a seed twice"):
        parse_threshold(threshold(seeds=[1, 2, 1]))


@pytest.mark.parametrize(
    ("text", "kind"),
    [("kind: SFTJob", "SFTJob"), ("kind: Threshold", "Threshold"), ("kind: Pod", "AgentRLJob"), ("[]", "AgentRLJob")],
)
def test_the_kind_of_a_file_is_that_of_a_job_where_it_has_none_that_is_read(
    tmp_path: Path, text: str, kind: str
) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert file_kind(tmp_path / "file.yaml") == kind


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("groupSize=4", "spec.groupSize: unknown field; did you mean spec.algorithm.groupSize?"),
        ("algorithm.maxFailedShar=0.1", "spec.algorithm.maxFailedShar: unknown field; did you mean maxFailedShare?"),
    ],
)
def test_an_unknown_field_is_looked_for_elsewhere_and_among_its_neighbours(override: str, problem: str) -> None:
    assert refused(override) == [problem]
