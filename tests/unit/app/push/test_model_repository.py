"""`kestrl export --push`: the Hub's own client uploads to a server that has its API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from tests.fakes.hub import TOKEN, Hub, serving_hub
from tests.program import run_program
from tests.unit.app.cli.test_front_door import MANIFEST

from kestrl._app.local.rundir import RunDir, make_folders
from kestrl._app.push.model_card import Exported, model_card, public_config, public_name
from kestrl._shared.spec import parse_job
from kestrl.runstate.states import RunPhase
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS
from kestrl.storage.files import digest
from kestrl.storage.summary import RunSummary, write_summary

CURVE = ({"step": 0.0, "reward": 0.25}, {"step": 10.0, "reward": 0.75, "answer_correct": 0.5})
SUMMARY = RunSummary(status=RunPhase.SUCCEEDED, steps=10, total_steps=10, evaluations=CURVE)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run that published one adapter."""
    spec = {**MANIFEST["spec"], "model": {"base": "hf://org/base"}}
    run = RunDir(tmp_path / "runs" / "job-1")
    run.path.mkdir(parents=True)
    make_folders(run, parse_job({**MANIFEST, "spec": spec}), tmp_path)
    config = {"base_model_name_or_path": str(tmp_path / "model"), "r": 4}
    files = {WEIGHTS: b"weights", "adapter_config.json": json.dumps(config).encode()}
    manifest = AdapterManifest(
        job="job",
        step=10,
        sha256=digest(files[WEIGHTS]),
        files={name: digest(content) for name, content in files.items()},
        base_model="m",
        rank=4,
        alpha=8,
        targets=("q_proj",),
        parent=None,
        probe=Probe(token_ids=(1,), logprobs=(), base_logprobs=()),
    )
    store = open_store(str(run.path))
    publish_adapter(store, files, manifest)
    write_summary(store, SUMMARY)
    return tmp_path


def variables(folder: Path, **more: str) -> Mapping[str, str]:
    """Variables without a token of the developer's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_HOME": str(folder / "no-login"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}


def test_an_adapter_is_uploaded_with_its_card(folder: Path, hub: Hub) -> None:
    environment = variables(folder, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    ended = run_program("export", "--push", "hf://team/better", cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert (hub.repositories, hub.files[WEIGHTS]) == (["team/better"], b"weights")
    assert json.loads(hub.files["adapter_config.json"]) == {"base_model_name_or_path": "org/base", "r": 4}
    assert "/commit/" in ended.stdout
    card = hub.files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/base"
    for line in ("* Data: `train.jsonl`", "| 0 | 0.25 |  |", "| 10 | 0.75 | 0.5 |"):
        assert f"{line}\n" in card
    assert 'PeftModel.from_pretrained(base, "team/better")' in card
    assert str(folder).encode() not in b"".join(hub.files.values())
    assert [path.name for path in folder.iterdir() if path.name not in {"runs", "no-login"}] == []


@pytest.mark.parametrize(
    ("token", "said"),
    [("", "there is no token for the Hub; set HF_TOKEN"), ("hf_wrong", "the Hub refuses the token for team/better")],
)
def test_without_a_login_nothing_is_exported(folder: Path, hub: Hub, token: str, said: str) -> None:
    environment = variables(folder, HF_ENDPOINT=hub.url, **({"HF_TOKEN": token} if token else {}))
    arguments = ("export", "--push", "hf://team/better", "--out", "adapter")
    ended = run_program(*arguments, cwd=folder, env=environment)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    assert not (folder / "adapter").exists()
    assert not [request for request in hub.requests if request.startswith("POST")]


def test_a_token_that_may_not_write_is_refused(folder: Path, hub: Hub) -> None:
    hub.read_only = True
    environment = variables(folder, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    ended = run_program("export", "--push", "hf://team/better", cwd=folder, env=environment)
    assert (ended.returncode, "set HF_TOKEN to one that may write" in ended.stderr) == (2, True), ended.stderr
    assert hub.files == {}


def test_a_hub_that_cannot_be_reached_is_named(folder: Path) -> None:
    environment = variables(folder, HF_ENDPOINT="http://127.0.0.1:1", HF_TOKEN=TOKEN)
    ended = run_program("export", "--push", "hf://team/better", cwd=folder, env=environment)
    assert (ended.returncode, "the Hub cannot be reached" in ended.stderr) == (1, True), ended.stderr


@pytest.mark.parametrize("address", ["team/better", "hf://better", "hf://team/bet ter", "s3://team/better"])
def test_another_address_is_refused(folder: Path, address: str) -> None:
    ended = run_program("export", "--push", address, cwd=folder, env=variables(folder))
    assert (ended.returncode, "is not of the form hf://ORG/NAME" in ended.stderr) == (2, True), ended.stderr


def test_a_destination_is_needed(folder: Path) -> None:
    ended = run_program("export", cwd=folder, env=variables(folder))
    assert (ended.returncode, "--out: name a folder to create, or a repository" in ended.stderr) == (2, True)


def test_what_is_exported_to_a_folder_too_is_left_as_it_was_published(folder: Path, hub: Hub) -> None:
    environment = variables(folder, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    ended = run_program("export", "--push", "hf://team/better", "--out", "adapter", cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == ["adapter_config.json", WEIGHTS]
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model")
    assert sorted(hub.files) == ["README.md", "adapter_config.json", WEIGHTS]


def test_the_card_of_a_model_that_has_not_ended_names_no_path() -> None:
    exported = Exported(
        name="job-v1", base="/home/me/model", data=["s3://bucket/rows.jsonl"], adapter=False, version="1", summary=None
    )
    card = model_card(exported, "team/better")
    assert "* Base model: `model`\n* Data: `rows.jsonl`\n" in card
    assert "Held-out" not in card
    assert 'AutoModelForCausalLM.from_pretrained("team/better")' in card
    assert (public_name("hf://org/x"), public_name("demo://tiny")) == ("hf://org/x", "demo://tiny")
    config = '{"_name_or_path": "/home/me/model"}'
    assert json.loads(public_config("config.json", config, "/home/me/model")) == {"_name_or_path": "model"}
