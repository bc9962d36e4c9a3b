"""Models in storage: what is written in which order, and what a reader accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrl.errors import StorageError
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.models import digest_of, fetch_model, model_folders, publish_model

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"words"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    for name, content in FILES.items():
        (tmp_path / "made" / name).write_bytes(content)
    return tmp_path / "made"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store((tmp_path / "store").as_uri())


def test_a_model_is_complete_before_it_is_one(
    folder: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    put = ObjectStore.put

    def noted(self: ObjectStore, path: str, content: bytes, *, create: bool = False) -> None:
        written.append(path.rpartition("/")[2])
        put(self, path, content, create=create)

    monkeypatch.setattr(ObjectStore, "put", noted)
    manifest, address = publish_model(store, folder, job="job", step=7, base="b")
    assert written == ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"]
    assert address == f"{store.uri}/models/000007-{manifest.sha256[:12]}"
    assert manifest.sha256 == digest_of(manifest.files)
    assert publish_model(store, folder, job="job", step=7, base="b") == (manifest, address), "again is no error"


def test_a_fetched_model_has_the_files_that_were_published(folder: Path, store: ObjectStore, tmp_path: Path) -> None:
    manifest, _ = publish_model(store, folder, job="job", step=7, base="b")
    assert fetch_model(store, tmp_path / "got", model_folders(store)[-1]) == manifest
    assert {path.name: path.read_bytes() for path in (tmp_path / "got").iterdir()} == FILES


def test_corrupt_and_incomplete_models_are_refused(folder: Path, store: ObjectStore, tmp_path: Path) -> None:
    _, address = publish_model(store, folder, job="job", step=7, base="b")
    stored = Path(address.removeprefix("file://"))
    (stored / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(StorageError, match=r"model\.safetensors is corrupt") as raised:
        fetch_model(store, tmp_path / "got", model_folders(store)[-1])
    assert raised.value.code == "digest_mismatch"
    assert not (tmp_path / "got").exists()
    (stored / "manifest.json").unlink()
    assert model_folders(store) == []
    with pytest.raises(StorageError):
        fetch_model(store, tmp_path / "got", f"models/{stored.name}")
