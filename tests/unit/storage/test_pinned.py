"""Files that tools read: how a manifest names them, and how they come to a pod or a machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kestrl._app import downloads
from kestrl._shared.plan.tools import tool_entries
from kestrl._shared.prepare import FileSource, PrepareSettings, prepare
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl._shared.spec.scalars import PinnedFile
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import open_store, pinned
from kestrl.storage.pinned import PART, Download, fetch, fetch_object, write_object

CONTENT = b"mail " * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
URI = f"s3://bucket/mail/mail.sqlite#sha256={DIGEST}"


def job(*files: dict[str, Any], **spec: Any) -> AgentRLJob:
    given = {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "train.jsonl"}, "files": list(files)},
        "rewards": [{"rule": "exact_answer"}],
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "mail"}}
    return parse_job({**document, "spec": {**given, **spec}})


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://bucket/mail.sqlite", "end it with #sha256= and the 64 digits that `sha256sum FILE` prints"),
        ("s3://bucket/mail.sqlite#sha256=abc", "end it with #sha256="),
        (f"s3://bucket#sha256={DIGEST}", "end it with #sha256="),
        ("hf://org/mail.sqlite", "scheme hf:// is not one of a file; use s3://"),
    ],
)
def test_a_file_says_which_content_is_meant(uri: str, problem: str) -> None:
    with pytest.raises(UserInputError, match=r"spec\.data\.files\[0\]\.uri: ") as refused:
        job({"uri": uri, "size": "1Gi"})
    assert problem in str(refused.value)


def test_a_file_is_listed_once_and_not_beside_an_environment() -> None:
    file = {"uri": URI, "size": "1Gi"}
    with pytest.raises(UserInputError, match=r"spec\.data\.files\[1\]\.uri: is listed twice"):
        job(file, file)
    environment = {"openenv": {"url": "http://127.0.0.1:1"}}
    with pytest.raises(UserInputError, match=r"spec\.data\.files: are read by spec\.tools"):
        job(file, environment=environment)


def test_the_volume_holds_the_files_with_a_tenth_to_spare() -> None:
    assert job({"uri": URI, "size": "4Gi"}).spec.data.files_gib == 5
    assert job().spec.data.files_gib == 0


def test_config_of_a_tool_names_a_file_by_its_uri() -> None:
    tool = {"name": "search", "use": "mine:Search", "config": {"database": URI, "limit": 3}}
    (entry,) = tool_entries(job({"uri": URI, "size": "1Gi"}, tools=[tool]).spec, {URI: "/files/mail.sqlite"})
    assert entry.config == {"database": "/files/mail.sqlite", "limit": 3}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder in place of a bucket, with a file."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "mail.sqlite").write_bytes(CONTENT)
    return tmp_path / "bucket"


def source(bucket: Path, volume: Path, **changes: Any) -> FileSource:
    given: dict[str, Any] = {
        "address": f"{bucket.as_uri()}/mail.sqlite",
        "digest": DIGEST,
        "target": str(volume / DIGEST / "mail.sqlite"),
        "most_bytes": 10_000,
        "seconds": 60.0,
        "field": "spec.data.files[0]",
    }
    return FileSource(**(given | changes))


def test_one_pod_fetches_a_file_and_others_find_it(
    bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = source(bucket, tmp_path / "volume")
    prepare(PrepareSettings(files=(file,), fetches=True))
    assert Path(file.target).read_bytes() == CONTENT
    assert [path.name for path in Path(file.target).parent.iterdir()] == ["mail.sqlite"]
    assert "0.0 MiB, for up to 60 s" in capsys.readouterr().out
    (bucket / "mail.sqlite").unlink()  # what is there is not fetched again
    prepare(PrepareSettings(files=(file,), fetches=True))
    prepare(PrepareSettings(files=(file,)))


def test_a_pod_that_waits_ends_with_what_it_waited_for(bucket: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="was not there within 0 s; see the pod of the role files") as ended:
        prepare(PrepareSettings(files=(source(bucket, tmp_path / "volume", seconds=0.0),)))
    assert ended.value.retryable


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": "0" * 64}, rf"spec\.data\.files\[0\]\.uri: .* has the sha256 {DIGEST}, and the manifest says 000"),
        ({"most_bytes": 4999}, r"spec\.data\.files\[0\]\.size: .* above the 0\.0 MiB of the manifest; raise it"),
    ],
)
def test_another_content_than_the_manifest_says_is_no_file(
    bucket: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserInputError, match=problem):
        prepare(PrepareSettings(files=(source(bucket, tmp_path / "volume", **changes),), fetches=True))
    assert [path for path in (tmp_path / "volume").rglob("*") if path.is_file()] == []


def test_a_missing_file_and_a_slow_one_are_failures_of_storage(bucket: Path, tmp_path: Path) -> None:
    absent = source(bucket, tmp_path, address=f"{bucket.as_uri()}/none.sqlite")
    with pytest.raises(StorageError, match=r"none\.sqlite does not exist") as missing:
        prepare(PrepareSettings(files=(absent,), fetches=True))
    assert missing.value.code == "not_found"
    with pytest.raises(StorageError, match=r"raise spec\.data\.files\[0\]\.timeout") as slow:
        prepare(PrepareSettings(files=(source(bucket, tmp_path, seconds=-1.0),), fetches=True))
    assert slow.value.retryable


def test_a_large_file_comes_in_parts(bucket: Path, tmp_path: Path) -> None:
    content = bytes(PART) + b"end"
    (bucket / "large").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    bounds, lines = Download("spec.data.files[0]", 2 * PART, 60.0), list[str]()
    target = tmp_path / "large"
    fetch(f"{bucket.as_uri()}/large", digest, target, bounds, opened=open_store, say=lines.append)
    assert target.read_bytes() == content
    assert len(lines) == 1


def test_one_machine_takes_a_local_file_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mail.sqlite").write_bytes(CONTENT)
    path = str(tmp_path / "mail.sqlite")
    for uri in ("mail.sqlite", f"{Path(path).as_uri()}#sha256={DIGEST}"):
        assert downloads.present_files(job({"uri": uri, "size": "1Mi"}), tmp_path) == {uri: path}
    with pytest.raises(UserInputError, match=r"spec\.data\.files\[0\]\.uri: .* and the manifest says 000"):
        downloads.present_files(job({"uri": f"mail.sqlite#sha256={'0' * 64}", "size": "1Mi"}), tmp_path)
    with pytest.raises(UserInputError, match=r"spec\.data\.files\[0\]\.uri: .*none\.sqlite does not exist"):
        downloads.present_files(job({"uri": "none.sqlite", "size": "1Mi"}), tmp_path)


def test_one_machine_downloads_a_file_once(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(downloads.VARIABLE, str(tmp_path / "kept"))
    pinned, opened = PinnedFile.read(URI), list[str]()
    assert pinned is not None

    def open_bucket(uri: str) -> Any:
        opened.append(uri)
        return open_store(bucket.as_uri())

    one = job({"uri": URI, "size": "1Mi"})
    assert downloads.present_files(one, tmp_path) == {}
    expected = {URI: pinned.place(str(tmp_path / "kept"))}
    for _ in range(2):
        assert downloads.fetched_files(one, tmp_path, open_bucket, lambda _: None) == expected
    assert (opened, Path(expected[URI]).read_bytes()) == (["s3://bucket/mail"], CONTENT)
    assert downloads.present_files(one, tmp_path) == expected


def test_data_of_an_object_store_is_downloaded_for_a_run(bucket: Path, tmp_path: Path) -> None:
    one = job()
    data = one.spec.data.model_copy(
        update={"train": one.spec.data.train.model_copy(update={"uri": "s3://b/mail.sqlite"})}
    )
    one = one.model_copy(update={"spec": one.spec.model_copy(update={"data": data})})
    local = downloads.with_fetched_data(one, tmp_path / "cache", lambda _: open_store(bucket.as_uri()))
    assert Path(local.spec.data.train.uri).read_bytes() == CONTENT
    assert downloads.with_fetched_data(local, tmp_path, open_store) is local


def test_an_object_takes_the_place_of_a_file_or_leaves_it_as_it_is(tmp_path: Path) -> None:
    store, target = open_store((tmp_path / "bucket").as_uri()), tmp_path / "cache" / "rows.jsonl"
    store.put("rows.jsonl", b"first")
    address = store.address("rows.jsonl")
    fetch_object(address, target, opened=open_store)
    store.put("rows.jsonl", b"second")
    fetch_object(address, target, opened=open_store)
    assert target.read_bytes() == b"second"
    with pytest.raises(StorageError):
        fetch_object(store.address("missing.jsonl"), target, opened=open_store)
    folder = tmp_path / "cache" / "folder"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        fetch_object(address, folder, opened=open_store)
    assert sorted(path.name for path in target.parent.iterdir()) == ["folder", "rows.jsonl"]


def test_an_object_is_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PART", 4)
    store, parts = open_store((tmp_path / "bucket").as_uri()), list[int]()
    read = store.get_range
    monkeypatch.setattr(store, "get_range", lambda *span: (parts.append(span[2]), read(*span))[1])
    for content in (b"0123456789", b"01234567", b""):
        store.put("shard", content)
        assert write_object(store, "shard", tmp_path / "shard") == hashlib.sha256(content).hexdigest()
        assert (tmp_path / "shard").read_bytes() == content
    assert parts == [4, 4, 2, 4, 4], "no request and no buffer has all of it"


def test_an_object_that_is_written_again_meanwhile_is_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PART", 4)
    store = open_store((tmp_path / "bucket").as_uri())
    store.put("shard", b"firstfirst")
    read = store.get_range

    def overwritten(path: str, start: int, length: int) -> bytes:
        part = read(path, start, length)
        store.put("shard", b"secondsecond")
        return part

    monkeypatch.setattr(store, "get_range", overwritten)
    with pytest.raises(StorageError, match="was written again while it was downloaded") as raised:
        fetch_object(store.address("shard"), tmp_path / "out" / "shard", opened=lambda _: store)
    assert raised.value.retryable
    assert list((tmp_path / "out").iterdir()) == []
