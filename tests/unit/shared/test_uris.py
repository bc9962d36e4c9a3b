"""Paths and `file://` URIs: what one helper makes the other reads, whatever the characters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.errors import UserInputError
from kestrl.storage import open_store
from kestrl.storage.uris import file_uri, is_local, local_path, scheme_of

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in {".", ".."}
)
ODD = "a b ü + @ ( ) , = # % ? %20 [x] ~ 'q'"


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_a_path_survives_a_round_trip_through_a_uri(parts: list[str]) -> None:
    path = Path("/nowhere", *parts)
    assert local_path(file_uri(path)) == path
    assert is_local(file_uri(path))


@given(NAMES)
def test_a_plain_path_is_never_decoded(name: str) -> None:
    path = f"/{name}"
    assert (scheme_of(path), local_path(path)) == ("", Path(path))


@pytest.mark.parametrize(
    ("address", "scheme"),
    [("s3://b/x", "s3"), ("HF://o/n", "hf"), ("demo://tiny", "demo"), ("file:/x", "file"), ("a#b?c", ""), ("a:b", "")],
)
def test_the_scheme_of_an_address(address: str, scheme: str) -> None:
    assert scheme_of(address) == scheme


@pytest.mark.parametrize("uri", ["file:/x y", "file:///x y", "file://localhost/x%20y"])
def test_a_file_uri_may_be_written_by_hand(uri: str) -> None:
    assert local_path(uri) == Path("/x y")


def test_a_file_uri_with_a_host_is_refused_with_the_fix() -> None:
    with pytest.raises(UserInputError, match=r"names the host 'runs'; write file:///ABSOLUTE/PATH"):
        local_path("file://runs/one")


@pytest.mark.parametrize("as_uri", [True, False])
def test_a_store_is_at_its_address(tmp_path: Path, as_uri: bool) -> None:
    folder = tmp_path / ODD
    store = open_store(file_uri(folder) if as_uri else str(folder))
    store.put("a/b", b"x")
    assert (folder / "a" / "b").read_bytes() == b"x"
    assert [path.name for path in tmp_path.iterdir()] == [ODD]
    again = open_store(store.address("a"))
    assert again.get("b") == b"x"


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="does not exist"):
        open_store(str(tmp_path / "none"), create=False)
    assert list(tmp_path.iterdir()) == []
