"""The conformance suite of object stores, on a folder and on a real S3 server, and what it finds."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fakes.s3 import S3Server

from kestrl.storage import ObjectStore, open_store
from kestrl.testing.object_store import check_object_store


def test_a_folder_is_a_store(tmp_path: Path) -> None:
    check_object_store(lambda: open_store(str(tmp_path / "a store")))


@pytest.mark.servers
def test_a_bucket_is_a_store(s3_environment: S3Server) -> None:
    address = f"s3://runs/{uuid.uuid4().hex}"
    check_object_store(lambda: open_store(address), concurrent_create=False)


class Overwriting(ObjectStore):
    """Ignores that an object may only be created, as servers without conditional writes do."""

    def put(self, path: str, content: bytes, *, create: bool = False) -> None:
        super().put(path, content)


class Flat(ObjectStore):
    """Takes the name of a folder for the beginning of a name."""

    def list(self, prefix: str) -> list[str]:
        return [path for path in super().list("") if path.startswith(prefix)]


class Whole(ObjectStore):
    """Answers a request for a range with the whole object."""

    def get_range(self, path: str, start: int, length: int) -> bytes:
        return self.get(path)


class Sorted(ObjectStore):
    """Answers ranges by their place in the object."""

    def get_ranges(self, path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return super().get_ranges(path, sorted(spans))


@pytest.mark.parametrize(
    ("kind", "property_"),
    [
        (Overwriting, "not created again"),
        (Flat, "a folder lists its own objects"),
        (Whole, "these bytes and no others"),
        (Sorted, "in the order that was asked for"),
    ],
)
def test_the_suite_names_what_does_not_hold(tmp_path: Path, kind: type[ObjectStore], property_: str) -> None:
    with pytest.raises(AssertionError, match=property_):
        check_object_store(lambda: kind(str(tmp_path)))


def test_a_store_with_objects_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "somebody's").write_text("x")
    with pytest.raises(AssertionError, match="must give an empty store"):
        check_object_store(lambda: open_store(str(tmp_path)))
    assert (tmp_path / "somebody's").read_text() == "x"
