"""The line that says why a job is not as it should be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.samples import all_pods, ended, failed, learner_report, pod, report, snapshot

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.crd import crd
from kestrl_operator.status.build import status_of, with_failure
from kestrl_operator.status.lifecycle import decide
from kestrl_operator.status.reason import LONGEST_LINE

OOM = ended("engine", "OOMKilled", 137)


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, ""),
        ({"job": None, "problem": "spec.model.base: is required"}, "Invalid: spec.model.base: is required"),
        ({"last_report": None, "pods": []}, "Pending: 0 of "),
        (
            {"pods": all_pods(pod(Role.INFERENCE, 1, ready=False, ended=(OOM,), restarts=4))},
            "OOMKilled: 1/2; email-search-inference-1: engine ended with OOMKilled",
        ),
        (
            {"last_report": learner_report(report(storage_wait="s3://b does not answer"))},
            "StorageUnavailable: s3://b does not answer",
        ),
        ({"last_report": learner_report(report(degenerate=True))}, "Degenerate: every group"),
        ({"last_report": learner_report(failed(code="logprob_gap"))}, "LearnerFailed: "),
    ],
)
def test_the_first_cause_is_shown(changes: dict[str, Any], begins: str) -> None:
    seen = snapshot(**changes)
    line = status_of(seen, decide(seen))["shown"].get("reason", "")
    assert line.startswith(begins)
    assert bool(line) == bool(begins)
    assert len(line) <= LONGEST_LINE


def test_a_failure_of_the_operator_is_shown() -> None:
    seen = snapshot()
    written = with_failure(status_of(seen, decide(seen)), "the API server refuses it", generation=1, now=0.0)
    assert written["shown"]["reason"] == "OperatorFailed: the API server refuses it"


def test_kubectl_shows_it_in_the_wide_table_alone() -> None:
    columns = crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    (reason,) = (column for column in columns if column["name"] == "Reason")
    assert (reason["jsonPath"], reason["priority"]) == (".status.shown.reason", 1)
    assert all("priority" not in column for column in columns if column["name"] != "Reason")
