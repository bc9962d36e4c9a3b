"""Storage and adapters: whole or not at all, every digest checked, nothing trusted but the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrl.errors import StorageError, UserInputError
from kestrl.storage import (
    AdapterManifest,
    ObjectStore,
    Probe,
    adapter_folder,
    fetch_adapter,
    open_store,
    publish_adapter,
)
from kestrl.storage.adapters import WEIGHTS, read_manifest
from kestrl.storage.files import PIECE_BYTES, digest

FILES = {WEIGHTS: b"weights", "adapter_config.json": b"{}"}


def manifest(files: dict[str, bytes] = FILES) -> AdapterManifest:
    return AdapterManifest(
        job="job",
        step=3,
        sha256=digest(files[WEIGHTS]),
        files={name: digest(content) for name, content in files.items()},
        base_model="/m",
        rank=8,
        alpha=16,
        targets=("q_proj",),
        parent=None,
        probe=Probe(token_ids=(1, 2), logprobs=(-1.0,), base_logprobs=(-1.0,)),
    )


def test_what_is_published_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    address = publish_adapter(store, FILES, manifest())
    assert address.endswith(f"adapters/000003-{digest(b'weights')[:12]}")
    assert fetch_adapter(open_store(address), tmp_path / "fetched") == manifest()
    assert (tmp_path / "fetched" / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize("size", [0, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_files_of_many_pieces_arrive_whole(store: ObjectStore, tmp_path: Path, size: int) -> None:
    files = {WEIGHTS: bytes(range(256)) * (size // 256) + b"x" * (size % 256)}
    address = publish_adapter(store, files, manifest(files))
    fetch_adapter(open_store(address), tmp_path / "fetched")
    assert (tmp_path / "fetched" / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_publishing_the_same_again_is_not_an_error(store: ObjectStore) -> None:
    assert publish_adapter(store, FILES, manifest()) == publish_adapter(store, FILES, manifest())


def test_a_version_without_its_manifest_does_not_exist(store: ObjectStore, tmp_path: Path) -> None:
    folder = adapter_folder(manifest().policy)
    store.put(f"{folder}/{WEIGHTS}", b"weights")
    with pytest.raises(StorageError) as caught:
        fetch_adapter(store, tmp_path / "fetched", folder)
    assert caught.value.code == "not_found"


def test_a_corrupt_file_is_refused_and_nothing_is_left_to_load(store: ObjectStore, tmp_path: Path) -> None:
    publish_adapter(store, FILES, manifest())
    folder = adapter_folder(manifest().policy)
    store.put(f"{folder}/{WEIGHTS}", b"other weights")
    with pytest.raises(StorageError, match="is corrupt") as caught:
        fetch_adapter(store, tmp_path / "fetched", folder)
    assert caught.value.code == "digest_mismatch"
    assert list(tmp_path.glob("fetched*")) == []


def test_a_file_in_the_manifest_that_was_not_uploaded(store: ObjectStore, tmp_path: Path) -> None:
    publish_adapter(store, FILES, manifest())
    folder = adapter_folder(manifest().policy)
    store.delete(f"{folder}/{WEIGHTS}")
    with pytest.raises(StorageError, match=f"{WEIGHTS} does not exist") as caught:
        fetch_adapter(store, tmp_path / "fetched", folder)
    assert caught.value.code == "not_found"
    assert not (tmp_path / "fetched").exists()


def test_a_manifest_that_describes_other_files_is_not_published(store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="does not describe its files"):
        publish_adapter(store, {**FILES, WEIGHTS: b"other"}, manifest())
    assert store.list("adapters") == []


@pytest.mark.parametrize("content", [b"{", b'{"job": "x"}', b'{"surprise": 1}'])
def test_a_malformed_manifest_is_reported(store: ObjectStore, content: bytes) -> None:
    store.put("manifest.json", content)
    with pytest.raises(StorageError, match="is not a manifest"):
        read_manifest(store)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "..", "", "a\0b", "a\nb", "é" * 128])
def test_a_manifest_cannot_name_a_file_outside_its_folder(store: ObjectStore, tmp_path: Path, name: str) -> None:
    wrong = manifest().model_copy(update={"files": {name: digest(b"x")}})
    store.put("manifest.json", wrong.model_dump_json().encode())
    with pytest.raises(StorageError, match="outside its folder"):
        fetch_adapter(store, tmp_path / "fetched")
    assert list(tmp_path.glob("fetched*")) == []


def test_policy_names_are_unique_to_the_bytes() -> None:
    other = manifest({**FILES, WEIGHTS: b"other"})
    assert manifest().policy.name != other.policy.name
    assert manifest().policy.name.startswith("job.3.")


def test_objects(store: ObjectStore) -> None:
    store.put("a/1", b"one")
    store.put("a/2", b"two")
    store.put("b", b"")
    assert store.list("a") == ["a/1", "a/2"]
    assert store.exists("a/1")
    assert not store.exists("a/3")
    assert store.get("a/2") == b"two"
    store.delete("a/2")
    store.delete("a/2")
    assert store.list("a/") == ["a/1"]
    with pytest.raises(StorageError, match="does not exist"):
        store.get("a/2")


def test_an_address_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in ("nonsense://x", str(tmp_path / "file" / "below")):
        with pytest.raises(UserInputError, match=r"storage\.uri"):
            open_store(uri)


def test_what_an_interrupted_download_left_is_not_in_the_folder(store: ObjectStore, tmp_path: Path) -> None:
    publish_adapter(store, FILES, manifest())
    target = tmp_path / "fetched"
    left = target.with_name(f"{target.name}.partial")
    left.mkdir()
    (left / "stray").touch()
    fetch_adapter(store, target, adapter_folder(manifest().policy))
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    assert not left.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"step": -5},
        {"rank": -1},
        {"alpha": float("nan")},
        {"probe": {"token_ids": [1, 2], "logprobs": [float("nan")], "base_logprobs": [-1.0]}},
        {"files": {"a\0b": "0"}},
        {"files": {"\ud800": "0"}},
        {"files": {"a" * 1_000: "0"}},
        {"files": {"..": "0"}},
    ],
)
def test_a_manifest_of_impossible_values_is_malformed(
    store: ObjectStore, tmp_path: Path, change: dict[str, object]
) -> None:
    content = {**manifest().model_dump(mode="json"), **change}
    store.put("v/manifest.json", json.dumps(content).encode())
    with pytest.raises(StorageError) as caught:
        fetch_adapter(store, tmp_path / "fetched", "v")
    assert caught.value.code == "manifest_malformed"
    assert list(tmp_path.glob("fetched*")) == []
