"""What `kestrl doctor` says of the devices, the disk and the set-up of a job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kestrl._app.checks import needs
from kestrl._app.local.runner_record import RunnerRecord
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl._shared.spec.job import Adapter
from kestrl.data.locate import locate_model
from kestrl.runstate.events import EnginesObserved, StepsPlanned, VersionVerified
from kestrl.runstate.log import Entry
from kestrl.runstate.segments import EVENTS
from kestrl.runstate.state import EngineReport


def job(**spec: Any) -> AgentRLJob:
    needed = {
        "model": {"base": "demo://tiny", "adapter": {"rank": 16}},
        "data": {"train": {"uri": "demo://email/train", "size": 80}},
        "rewards": [{"rule": "exact_answer"}],
        "algorithm": {"groupsPerStep": 8},
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "mine"}}
    return parse_job({**document, "spec": {**needed, **spec}})


@pytest.fixture
def tiny() -> Path:
    return Path(locate_model("demo://tiny", base=Path.cwd()))


def test_the_size_of_an_adapter_is_that_of_its_matrices(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    hidden, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    assert needs.adapter_bytes(tiny, Adapter(rank=16, targets=["up_proj"])) == 4 * 16 * (hidden + inner) * layers
    # 941,016 bytes were stored by a run of this model and rank, with a header of tensor names
    assert needs.adapter_bytes(tiny, Adapter(rank=16)) == pytest.approx(941_016, rel=0.02)


def test_a_damaged_or_missing_file_of_weights_has_no_size(tmp_path: Path) -> None:
    assert needs.adapter_bytes(tmp_path, Adapter()) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert needs.adapter_bytes(tmp_path, Adapter()) is None
    text, fix = needs.job_disk(job(), str(tmp_path), tmp_path)
    assert (text, fix) == ("the size of the adapter is not known before the model is loaded", "")


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [({}, 11), ({"maxSteps": 4}, 5), ({"epochs": 3}, 31), ({"keepAdapters": 2}, 6)],
)
def test_the_disk_of_a_run_is_that_of_the_versions_it_keeps(schedule: dict[str, int], versions: int) -> None:
    assert needs.run_bytes(job(schedule=schedule), 100) == 100 * versions + 3 * 3 * 100


def test_a_disk_that_cannot_hold_a_run_is_a_finding(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, fix = needs.job_disk(job(), str(tiny), tmp_path)
    assert text.startswith("a version of the adapter has 0.9 MiB, and 2 checkpoints of 2.7 MiB are kept, up to 17.")
    assert not fix
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    _, fix = needs.job_disk(job(), str(tiny), tmp_path)
    assert fix == (
        f"{tmp_path} has 1.0 MiB free: set spec.schedule.keepAdapters, which is all, or write elsewhere (--runs, "
        "spec.storage.uri)"
    )
    _, fix = needs.job_disk(job(), str(tiny), None)
    assert not fix


def test_a_model_of_the_hub_is_downloaded(tmp_path: Path) -> None:
    text, _ = needs.job_disk(job(), "Qwen/Qwen2.5-7B-Instruct", tmp_path)
    assert text.startswith("Qwen/Qwen2.5-7B-Instruct is downloaded at its first use")


def write_run(folder: Path, *, started: float, first: float) -> None:
    """A run whose engines had verified the first version at 130 s; what gauges saw is not stored each time."""
    (folder / EVENTS).mkdir(parents=True)
    reports = (EngineReport(name="engine-0"), EngineReport(name="engine-1"))
    entries = [
        Entry(number=1, at=first, event=StepsPlanned(total=4)),
        Entry(number=2, at=130.0, event=VersionVerified(seconds=9.0)),
        Entry(number=3, at=160.0, event=VersionVerified(seconds=1.0)),
        Entry(number=4, at=180.0, event=EnginesObserved(verified=2, reports=reports, total=2)),
    ]
    lines = [json.dumps({"version": 1, "state": {"version": 1}, "compacted": False})]
    lines += [entry.model_dump_json() for entry in entries]
    (folder / EVENTS / "000000000001-00000001.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(RunnerRecord(run=folder.name, started_at=started).text())


def test_the_set_up_takes_what_it_took_in_the_newest_run(tmp_path: Path) -> None:
    assert needs.set_up(job(), tmp_path).startswith("not measured here yet")
    write_run(tmp_path / "mine-1", started=100.0, first=101.0)
    assert needs.set_up(job(), tmp_path) == "30 s from the start to the first rollout, as measured in mine-1"
    other = replace_name(job(), "other")
    assert needs.set_up(other, tmp_path).startswith("not measured here yet")


def replace_name(each: AgentRLJob, name: str) -> AgentRLJob:
    return each.model_copy(update={"metadata": each.metadata.model_copy(update={"name": name})})


def test_a_resumed_or_damaged_run_has_no_set_up(tmp_path: Path) -> None:
    write_run(tmp_path / "mine-1", started=125.0, first=101.0)
    assert needs.measured(tmp_path / "mine-1") is None
    (tmp_path / "mine-1" / "run.json").write_text("{")
    assert needs.measured(tmp_path / "mine-1") is None
