"""Files that rows name by their uri."""

from __future__ import annotations

from typing import Any

import pytest

from kestrl.errors import ToolFailure
from kestrl_tools.rows import placed

URI = f"s3://bucket/mail.sqlite#sha256={'a' * 64}"


def row(database: str) -> dict[str, Any]:
    return {"search": {"create_kwargs": {"database": database, "limit": 3}, "execute_kwargs": {}}, "read": {}}


def test_a_row_gets_the_path_of_a_file() -> None:
    assert placed(row(URI), {URI: "/files/mail.sqlite"}) == row("/files/mail.sqlite")
    assert placed(row("/own/mail.sqlite"), {URI: "/files/mail.sqlite"}) == row("/own/mail.sqlite")


def test_a_file_that_the_manifest_does_not_list_is_refused() -> None:
    with pytest.raises(ToolFailure, match=r"search: s3://.* is not one of spec\.data\.files; list it there") as refused:
        placed(row(URI), {"s3://other": "/files/other"})
    assert refused.value.code == "tool_kwargs_invalid"


def test_a_check_leaves_files_of_which_it_has_no_copy() -> None:
    assert placed(row(URI), {}, [URI]) == row(URI)
    assert placed({"search": None}) == {"search": None}
