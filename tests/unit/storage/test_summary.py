"""`summary.json`: one model for its writers and readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrl.errors import StorageError, UserInputError
from kestrl.runstate.states import RunPhase
from kestrl.storage import open_store
from kestrl.storage.layout import SUMMARY
from kestrl.storage.summary import DAMAGED, RunSummary, SFTSummary, SummaryPolicy, read_summary, write_summary

POLICY = SummaryPolicy(version="job.3.0123456789ab", sha256="0123456789ab" * 5, uri="file:///runs/a")


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert read_summary(store) is None
    written = RunSummary(
        status=RunPhase.SUCCEEDED,
        steps=3,
        before={"reward": 0.5},
        evaluations=({"step": 0, "reward": 0.5},),
        policy=POLICY,
        learned=True,
        failures={"tool/tool_raised": 1},
    )
    write_summary(store, written)
    assert read_summary(store) == written
    assert json.loads(store.get(SUMMARY))["version"] == RunSummary.CURRENT


def test_a_number_that_is_not_finite_survives(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    write_summary(store, RunSummary(status=RunPhase.FAILED, logprob_gap={"mean": float("nan"), "max": float("inf")}))
    found = read_summary(store)
    assert found is not None
    assert found.logprob_gap["mean"] != found.logprob_gap["mean"]
    assert found.logprob_gap["max"] == float("inf")


def test_a_summary_without_a_version_is_of_the_first(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(SUMMARY, b'{"status": "succeeded", "steps": 2, "of_tomorrow": 1}')
    found = read_summary(store)
    assert found is not None
    assert (found.version, found.steps, found.policy) == (1, 2, None)


def test_a_summary_of_fine_tuning_reads_like_one_of_training(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    write_summary(store, SFTSummary(status=RunPhase.SUCCEEDED, steps=4, conversations=9, policy=POLICY))
    found = read_summary(store)
    assert found is not None
    assert (found.steps, found.policy) == (4, POLICY)
    assert json.loads(store.get(SUMMARY))["conversations"] == 9


def test_a_summary_of_a_later_version_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(SUMMARY, json.dumps({"status": "succeeded", "version": RunSummary.CURRENT + 1}).encode())
    with pytest.raises(UserInputError, match="later version of KestRL: its summary has version 2"):
        read_summary(store)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"status": "x"}', b'{"steps": 1}', b"\xff"])
def test_a_damaged_summary_is_a_typed_failure(content: bytes, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(SUMMARY, content)
    with pytest.raises(StorageError, match=r"summary\.json is not a summary") as raised:
        read_summary(store)
    assert raised.value.code == DAMAGED
