"""The run record in checkpoints: what earlier versions wrote is read, what later ones wrote is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrl.errors import UserInputError
from kestrl.runstate.history import LearningCounts, Mismatch, Stale
from kestrl.storage import open_store
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import checkpoint
from kestrl_learner.store.run_record import RunRecord

MEANS = {"answer_correct": 0.5, "reward": 0.25, "num_turns": 2.0, "duration": 0.5, "episodes": 3.0, "exceptions": 0.0}
WITHOUT_VERSION: dict[str, Any] = {
    "seconds": 0.39,
    "before": {**MEANS, "sampled_reward": 0.5, "sampled_answer_correct": 0.5},
    "learning": {
        "first": "ca8eff01",
        "steps": 2,
        "groups": 4,
        "idle_groups": 1,
        "tool_calls": 7,
        "largest_gradient": 0.22,
    },
    "evaluations": {"0": MEANS, "2": {**MEANS, "reward": float("nan")}},
    "gap": {"tokens": 132, "mean": 2.3e-08, "p99": 4.7e-07, "max": 4.8e-07, "ess": 1.0},
    "digest": "479077d1",
    "owner": 3,
    "failures": {"tool/tool_raised": 2},
    "skipped": [["train", 3], ["validation", 0]],
    "stale": {"groups": 3, "by_age": {"1": 2, "2": 1}, "seconds": 1.5, "tokens": 40},
}
"""A record as version 0.1 wrote it, before records had a version."""


def test_a_record_without_a_version_is_read() -> None:
    record = RunRecord.from_json(WITHOUT_VERSION, "checkpoints/000002/manifest.json")
    assert record.before == WITHOUT_VERSION["before"]
    assert list(record.evaluations) == [0, 2]
    assert record.gap == Mismatch(tokens=132, mean=2.3e-08, p99=4.7e-07, max=4.8e-07, ess=1.0)
    assert record.learning == LearningCounts(
        first="ca8eff01", steps=2, groups=4, idle_groups=1, tool_calls=7, largest_gradient=0.22
    )
    assert (record.digest, record.owner, record.seconds) == ("479077d1", 3, 0.39)
    assert (record.failures, record.skipped) == ({"tool/tool_raised": 2}, (("train", 3), ("validation", 0)))
    assert (record.stale.by_age, record.stale.tokens) == ({1: 2, 2: 1}, 40)


def test_a_record_is_read_as_it_was_written() -> None:
    record = RunRecord.from_json(WITHOUT_VERSION, "").but(after=MEANS)
    written = json.dumps(record.to_json())
    assert json.loads(written)["version"] == RunRecord.CURRENT
    again = RunRecord.from_json(json.loads(written), "")
    assert json.dumps(again.to_json()) == written, "NaN included"
    assert again.but(evaluations={}) == record.but(evaluations={})


def test_an_empty_record_is_read() -> None:
    assert RunRecord.from_json({}, "") == RunRecord(stale=Stale())


@pytest.mark.parametrize("content", [{"owner": "no number"}, {"version": "x", "seconds": []}])
def test_a_malformed_record_is_a_value_error(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        RunRecord.from_json(content, "")


async def test_a_run_stored_before_records_had_a_version_is_resumed(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        manifest = stage.folder / "store" / "checkpoints" / "000002" / "manifest.json"
        stored = json.loads(manifest.read_text())
        own = {name: stored["facts"][name] for name in ("digest", "owner")}
        manifest.write_text(json.dumps({**stored, "facts": WITHOUT_VERSION | own}))
        await LearnerRun(stage.but(max_steps=4)).main()
        assert stage.summary["steps"] == 4
        assert stage.summary["before"] == WITHOUT_VERSION["before"]
        assert stage.summary["failures"] == {"tool/tool_raised": 2}
        assert stage.summary["skipped_rows"] == 2
        assert stage.summary["stale"]["by_age"] == {"1": 2, "2": 1}
        assert stage.summary["logprob_gap"]["tokens"] > 132
        newest = checkpoint.newest_manifest(open_store(stage.settings.storage))
        assert newest is not None
        assert newest.record.learning.steps == 4


async def test_a_run_of_a_later_version_is_refused_and_left_as_it_is(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        store = stage.folder / "store"
        manifest = store / "checkpoints" / "000002" / "manifest.json"
        stored = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**stored, "facts": {**stored["facts"], "version": RunRecord.CURRENT + 1}}))
        before = contents(store)
        refusal = rf"000002/manifest.json .* later version .* version {RunRecord.CURRENT + 1}"
        with pytest.raises(UserInputError, match=refusal):
            await LearnerRun(stage.but(max_steps=4)).main()
        after = contents(store)
        assert after.pop("summary.json") != before.pop("summary.json"), "the summary names the failure"
        assert after == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
