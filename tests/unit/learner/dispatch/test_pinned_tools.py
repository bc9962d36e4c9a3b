"""The tools that servers list are pinned in the run's storage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrl.errors import Boundary, ToolFailure
from kestrl.storage import layout, open_store
from kestrl_learner.concurrency import guarded
from kestrl_learner.dispatch.pinned_tools import PinnedTools
from kestrl_learner.run import LearnerRun


async def verified(folder: Path, *digests: Mapping[str, str]) -> None:
    """A process of the run whose groups carry these digests."""
    pinned = PinnedTools(open_store(folder.as_uri()))
    watching = asyncio.create_task(pinned.watch())

    async def groups() -> None:
        for each in digests:
            await pinned.verify(each)

    try:
        async with asyncio.timeout(10):
            await guarded(groups(), watching)
    finally:
        watching.cancel()


async def test_a_resumed_run_finds_that_a_server_lists_other_tools(tmp_path: Path) -> None:
    await verified(tmp_path, {}, {"files": "a"}, {"files": "a"})
    assert json.loads((tmp_path / layout.TOOLS).read_text()) == {"files": "a"}
    await verified(tmp_path, {"files": "a"})
    with pytest.raises(ToolFailure, match=r"files: the server lists other tools than at the start") as caught:
        await verified(tmp_path, {"files": "b"})
    assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tools_changed")


async def test_groups_that_end_at_once_are_compared_with_one_record(tmp_path: Path) -> None:
    pinned = PinnedTools(open_store(tmp_path.as_uri()))
    watching = asyncio.create_task(pinned.watch())

    async def groups() -> None:
        await asyncio.gather(*(pinned.verify({"files": each}) for each in "aab"))

    with pytest.raises(ToolFailure, match="lists other tools"):
        await guarded(groups(), watching)
    assert json.loads((tmp_path / layout.TOOLS).read_text()) == {"files": "a"}


async def test_no_group_with_other_tools_is_trained_on(staged: Any) -> None:
    async with staged() as stage:
        stage.workers[0].tool_digests = {"files": "a"}
        async with asyncio.timeout(30):
            await LearnerRun(stage.but(max_steps=1)).main()
        stage.workers[0].tool_digests = {"files": "b"}
        with pytest.raises(ToolFailure, match="files: the server lists other tools"):
            async with asyncio.timeout(30):
                await LearnerRun(stage.but(max_steps=2)).main()
        assert (stage.summary["status"], stage.summary["steps"]) == ("failed", 1)
        assert stage.states["trained"] == 2
        stage.workers[0].tool_digests = {"files": "a"}
        async with asyncio.timeout(30):
            await LearnerRun(stage.but(max_steps=2)).main()
        assert (stage.summary["status"], stage.summary["steps"]) == ("succeeded", 2)
