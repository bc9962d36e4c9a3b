"""The pin of the tools that servers list: recorded before the first group of a run counts, compared with from then on.

A server that lists other tools changes what the model is trained on. The record is in the run's storage, so that it
also holds for a resumed run and for workers and tool services that start again. Each group carries the digests of the
lists that it was rolled out with, so that no group with other tools counts. An evaluation by `kestrl eval` has a
record of its own, which the command compares with the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kestrl.errors import ToolFailure
from kestrl.storage import ObjectStore, layout
from kestrl.storage.tool_lists import ToolLists, changed_servers, read_tool_lists, write_tool_lists


class PinnedTools:
    """Digests of the servers' lists, as groups carry them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pinned: ToolLists = {}
        self._waiting: asyncio.Queue[tuple[ToolLists, asyncio.Event]] = asyncio.Queue()
        """Digests to verify, and what to set when they are the record's."""

    async def verify(self, digests: Mapping[str, str]) -> None:
        """Returns once a group's digests are known to be the record's; others end the run in `watch`."""
        if digests and digests != self._pinned:
            verified = asyncio.Event()
            self._waiting.put_nowait((dict(digests), verified))
            await verified.wait()

    async def watch(self) -> None:
        """Records the first digests and compares all others, until cancelled.

        Raises:
            ToolFailure: A server lists other tools than at the start of the run.
            StorageError: The record cannot be read or written.
        """
        while True:
            digests, verified = await self._waiting.get()
            pinned = self._pinned or await asyncio.to_thread(read_tool_lists, self._store)
            if not pinned:
                pinned = digests
                await asyncio.to_thread(write_tool_lists, self._store, pinned)
            elif changed := changed_servers(pinned, digests):
                raise ToolFailure(
                    f"spec.tools: {', '.join(changed)}: the server lists other tools than at the start of the run; the "
                    f"tools of a run cannot change: start a new run, or pin the server's version "
                    f"({self._store.address(layout.TOOLS)} has the digests)",
                    code="tools_changed",
                )
            self._pinned = pinned
            verified.set()
