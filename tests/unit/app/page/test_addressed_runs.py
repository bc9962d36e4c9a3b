"""The runs below an address: which folders are runs, in which order, and what is read of them."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stored_runs import make_stored_run, store_summary
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.page.addressed_runs import AddressedRuns, library_at
from kestrl._app.page.library import RunFacts
from kestrl.runstate.states import RunPhase
from kestrl.storage import open_store
from kestrl.storage.layout import SUMMARY


def result(folder: Path, status: RunPhase, at: float) -> None:
    """Writes the result of a run, at a time."""
    store_summary(folder, status, steps=2)
    os.utime(folder / SUMMARY, (at, at))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder in place of a bucket: two runs that have ended, one that has not, and data."""
    folder = tmp_path / "bucket"
    for name, at in (("older-1", 1_000.0), ("newer-1", 2_000.0)):
        make_stored_run(folder / name)
        (folder / name / "job.json").unlink()  # a run of a cluster has none
        result(folder / name, RunPhase.SUCCEEDED, at)
    (folder / "trains-1" / "metrics").mkdir(parents=True)
    (folder / "trains-1" / "metrics" / "000001.json").write_text("{}")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("{}")
    return folder


def below(folder: Path) -> AddressedRuns:
    library = library_at(folder.as_uri())
    assert isinstance(library, AddressedRuns)
    return library


def test_folders_with_what_a_run_stores_are_runs_and_the_newest_result_is_first(bucket: Path) -> None:
    assert list(below(bucket).names()) == ["newer-1", "older-1", "trains-1"]


def test_the_address_of_one_run_is_no_library(bucket: Path) -> None:
    assert library_at((bucket / "older-1").as_uri()) is None
    assert library_at((bucket / "data").as_uri()) is None


def test_a_run_is_found_by_its_name_and_nothing_else_is(bucket: Path) -> None:
    library = below(bucket)
    place = library.place("older-1")
    assert place is not None
    assert place.store.exists("episodes/train/step=000001.parquet")
    assert [library.place(name) for name in ("data", "..", "../bucket/older-1", "older-1/episodes", "none")] == [
        None
    ] * 5


def test_facts_follow_the_result(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl._app.page.addressed_runs.LISTED_SECONDS", 0.0)
    library = below(bucket)

    def facts(name: str) -> RunFacts:
        assert name in library.names()
        return library.facts(name)

    assert (facts("trains-1").state, facts("trains-1").live) == ("not ended", True)
    assert facts("older-1").state == "succeeded"
    assert facts("older-1") is facts("older-1"), "a result is read once"
    result(bucket / "older-1", RunPhase.FAILED, 3_000.0)
    assert facts("older-1").state == "failed"
    (bucket / "older-1" / SUMMARY).write_text("damaged")
    assert facts("older-1").state == "unreadable"
    shutil.rmtree(bucket / "older-1")
    assert list(library.names()) == ["newer-1", "trains-1"]


def test_the_command_shows_all_runs_of_an_address(bucket: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["ui", bucket.as_uri(), "--export", str(tmp_path / "site")])
    assert shown.exit_code == 0, shown.output
    runs = sorted(path.name for path in (tmp_path / "site" / "runs").iterdir())
    assert runs == ["newer-1", "older-1", "trains-1"]


@pytest.mark.servers
def test_runs_of_a_bucket(bucket: Path, s3_environment: Any) -> None:
    address = f"s3://runs/{uuid.uuid4().hex}"
    remote, local = open_store(address), open_store(str(bucket))
    for path in local.list(""):
        remote.put(path, local.get(path))
    library = library_at(address)
    assert library is not None
    assert sorted(library.names()) == ["newer-1", "older-1", "trains-1"]
    assert {name: library.facts(name).state for name in library.names()} == {
        "newer-1": "succeeded", "older-1": "succeeded", "trains-1": "not ended",
    }  # fmt: skip
    assert library_at(f"{address}/older-1") is None
    place = library.place("older-1")
    assert place is not None
    assert place.store.exists("episodes/train/step=000001.parquet")
