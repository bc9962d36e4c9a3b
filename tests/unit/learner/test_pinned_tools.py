"""The tools that servers list are pinned in the run's storage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kestrl.errors import Boundary, ToolFailure
from kestrl.storage import layout, open_store
from kestrl_learner.pinned_tools import PinnedTools


async def reported(folder: Path, *reports: Mapping[str, str]) -> None:
    """A process of the run that gets reports, for a second or until it fails."""
    pinned = PinnedTools(open_store(folder.as_uri()))
    for report in reports:
        pinned.report(report)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await pinned.watch()


async def test_a_resumed_run_finds_that_a_server_lists_other_tools(tmp_path: Path) -> None:
    await reported(tmp_path, {}, {"files": "a"}, {"files": "a"})
    assert json.loads((tmp_path / layout.TOOLS).read_text()) == {"files": "a"}
    await reported(tmp_path, {"files": "a"})
    with pytest.raises(ToolFailure, match=r"files: the server lists other tools than at the start") as caught:
        await reported(tmp_path, {"files": "b"})
    assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tools_changed")
