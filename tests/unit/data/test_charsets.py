"""Character sets that a stranger's text may declare."""

from __future__ import annotations

import time

import pytest

from kestrl.data.charsets import TEXT, charset_of


@pytest.mark.parametrize(
    "name",
    ["punycode", "idna", "zlib", "hex", "rot13", "undefined", "unicode_escape", "mbcs", "x\x00", "", None, "\ud800"],
)
def test_what_is_no_character_set_of_text_is_none(name: str | None) -> None:
    assert charset_of(name) is None


@pytest.mark.parametrize("name", ["UTF-8", "latin1", "ISO-8859-15", "windows-1252", "Shift_JIS", "us-ascii", "utf_16"])
def test_usual_names_are_known(name: str) -> None:
    assert charset_of(name) in TEXT


@pytest.mark.parametrize("name", sorted(TEXT))
def test_each_takes_time_linear_in_the_text(name: str) -> None:
    began = time.process_time()
    (bytes(range(256)) * 4000).decode(name, "replace")
    assert time.process_time() - began < 5
