"""What a pod needs before its program starts, put in place as its init container does it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from tests.fakes.s3 import S3Server, serving_s3

from kestrl._shared.prepare import DataSource, PrepareSettings, prepare
from kestrl._shared.text.chat_model import load_model
from kestrl.data import load_scenarios
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import open_store
from kestrl.storage.models import publish_model
from kestrl_demo_models.tiny import tiny


def settings(folder: Path, **changes: Any) -> PrepareSettings:
    given: dict[str, Any] = {
        "model_target": str(folder / "model"),
        "data_dir": str(folder / "data"),
        "seed": 42,
        "template_target": str(folder / "data" / "template.jinja"),
        "volumes": str(folder / "pvc"),
    }
    return PrepareSettings(**(given | changes))


def source(folder: Path, uri: str, size: int | None = 5) -> DataSource:
    return DataSource(uri=uri, size=size, target=str(folder / "data" / "train.jsonl"), field="spec.data.train.uri")


def test_the_demo_is_made_in_every_pod_alike(tmp_path: Path) -> None:
    """Twice at the same place, as two pods have it: the same rows, which name a database that is there."""
    seen: list[bytes] = []
    for _ in range(2):
        wanted = settings(tmp_path, model="demo://tiny", data=(source(tmp_path, "demo://email/train"),))
        prepare(wanted)
        rows = (tmp_path / "data" / "train.jsonl").read_bytes()
        seen.append(rows)
        scope = json.loads(rows.splitlines()[0])["extra_info"]["tools_kwargs"]["search_emails"]["create_kwargs"]
        assert Path(scope["database"]).is_file()
        for path in (tmp_path / "data").iterdir():
            path.unlink()
    assert seen[0] == seen[1]
    assert (tmp_path / "model" / "config.json").read_bytes() == (tiny() / "config.json").read_bytes()
    assert not (tmp_path / "model").is_symlink()  # an engine's image does not have the package that it came from


def test_files_of_a_claim_are_linked_and_nothing_outside_it(tmp_path: Path) -> None:
    claim = tmp_path / "pvc" / "shared"
    claim.mkdir(parents=True)
    (claim / "rows.jsonl").write_text('{"id": "1", "question": "?"}\n')
    (claim / "chat.jinja").write_text("{{ messages }}")
    (claim / "base").symlink_to(tiny())
    prepare(settings(tmp_path, data=(source(tmp_path, "pvc://shared/rows.jsonl"),), template="pvc://shared/chat.jinja"))
    assert len(load_scenarios(tmp_path / "data" / "train.jsonl")) == 1
    assert (tmp_path / "data" / "template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(UserInputError, match="leads out of its claim"):
        prepare(settings(tmp_path, data=(source(tmp_path, "pvc://shared/../../secret"),)))
    with pytest.raises(UserInputError, match="leads out of its claim"):
        prepare(settings(tmp_path, model="pvc://shared/base"))  # a link to elsewhere is no way out either


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": "train.jsonl"},
            "spec.data.train.uri: 'train.jsonl' is a local path",
        ),
        ({"data": "file:///nowhere/x.jsonl"}, "spec.data.train.uri: /nowhere/x.jsonl does not exist in the pod"),
        ({"data": "pvc://shared/x.jsonl"}, "spec.data.train.uri: pvc://shared/x.jsonl does not exist in its claim"),
        ({"data": "demo://nobody/train"}, "no installed package offers demo://nobody"),
        ({"model": "demo://nobody"}, "no installed package offers demo://nobody"),
        ({"template": "chat.jinja"}, "spec.agent.template.uri: 'chat.jinja' is a local path"),
    ],
)
def test_a_missing_file_is_reported_by_its_field(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    given: dict[str, Any] = dict(changes)
    if "data" in given:
        given["data"] = (source(tmp_path, changes["data"]),)
    with pytest.raises(UserInputError, match=message):
        prepare(settings(tmp_path, **given))


def test_the_program_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "prepare.json"
    path.write_text(settings(tmp_path, model="demo://nobody").model_dump_json())
    command = [sys.executable, "-m", "kestrl._shared.prepare", "--settings", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: spec.model.base: no installed package offers demo://nobody")
    assert done.stderr.count("\n") == 1


def test_a_model_of_sft_is_fetched_with_its_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local store in place of an object store, whose addresses are opened alike."""
    monkeypatch.setattr("kestrl._shared.prepare.OBJECT_SCHEMES", frozenset({"file"}))
    store = open_store((tmp_path / "store").as_uri())
    manifest, address = publish_model(store, tiny(), job="warm-up", step=3, base="demo://tiny")
    prepare(settings(tmp_path, model=address))
    assert {path.name for path in (tmp_path / "model").iterdir()} == manifest.files.keys()
    stored = Path(address.removeprefix("file://"))
    (stored / "tokenizer.json").write_text("{}")
    with pytest.raises(StorageError, match=r"tokenizer\.json is corrupt"):
        prepare(settings(tmp_path / "other", model=address))
    (stored / "manifest.json").write_text('{"name": "of another program"}')
    prepare(settings(tmp_path / "another", model=address))
    assert (tmp_path / "another" / "model" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("published", [True, False])
def test_a_worker_fetches_a_model_without_its_weights(
    published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl._shared.prepare.OBJECT_SCHEMES", frozenset({"file"}))
    store = open_store((tmp_path / "store").as_uri())
    if published:
        _, address = publish_model(store, tiny(), job="warm-up", step=3, base="demo://tiny")
    else:
        address = store.address("tiny")
        for path in tiny().iterdir():
            store.put(f"tiny/{path.name}", path.read_bytes())
    prepare(settings(tmp_path, model=address, model_weights=False))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {path.name for path in tiny().iterdir()} - {"model.safetensors"}
    started = datetime(2026, 1, 1, tzinfo=UTC)
    load_model(str(tmp_path / "model"), None, tools=True, started=started)  # all that a worker loads of it


@pytest.mark.parametrize("weights", [True, False])
def test_a_repository_of_a_hub_is_asked_for_what_is_needed(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = ["config.json", "model-00001-of-00002.safetensors", "original/params.pth", "tokenizer.json"]

    def download(name: str, *, local_dir: str, ignore_patterns: list[str] | None) -> None:
        """What the hub's client does with the patterns."""
        for path in filter_repo_objects(repository, ignore_patterns=ignore_patterns):
            (Path(local_dir) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(local_dir) / path).write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    prepare(settings(tmp_path, model="hf://org/model", model_weights=weights))
    present = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert present == (set(repository) if weights else {"config.json", "tokenizer.json"})


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.servers
@pytest.mark.timeout(120)
def test_objects_are_fetched_whole(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3.create_bucket("inputs")
    for path in tiny().iterdir():
        bucket.put(f"models/tiny/{path.name}", path.read_bytes())
    bucket.put("rows/train.jsonl", b'{"id": "1", "question": "?"}\n')
    prepare(
        settings(tmp_path, model="s3://inputs/models/tiny", data=(source(tmp_path, "s3://inputs/rows/train.jsonl"),))
    )
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in tiny().iterdir()}
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (tiny() / "model.safetensors").read_bytes()
    assert len(load_scenarios(tmp_path / "data" / "train.jsonl")) == 1
    with pytest.raises(StorageError, match="holds no objects"):
        prepare(settings(tmp_path / "other", model="s3://inputs/models/none"))
    with pytest.raises(StorageError, match="does not exist"):
        prepare(settings(tmp_path, data=(source(tmp_path, "s3://inputs/rows/none.jsonl"),)))
