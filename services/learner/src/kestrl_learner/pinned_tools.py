"""The pin of the tools that servers list: recorded at the first report of a run, and compared with from then on.

A server that lists other tools changes what the model is trained on. The record is in the run's storage, so that it
also holds for a resumed run and for workers and tool services that start again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from kestrl.errors import StorageError, ToolFailure
from kestrl.storage import ObjectStore, layout


class PinnedTools:
    """Digests of the servers' lists, as workers report them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._reported: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
        self._seen: list[Mapping[str, str]] = []
        """Reports that were queued before; at most one that differs from the record ends the run."""

    def report(self, digests: Mapping[str, str]) -> None:
        """Queues a report of a worker, if it says anything new."""
        if digests and digests not in self._seen:
            self._seen.append(dict(digests))
            self._reported.put_nowait(dict(digests))

    async def watch(self) -> None:
        """Records the first report and compares each other one, until cancelled.

        Raises:
            ToolFailure: A server lists other tools than at the start of the run.
            StorageError: The record cannot be read or written.
        """
        pinned: Mapping[str, str] | None = None
        while True:
            found = await self._reported.get()
            pinned = pinned or await asyncio.to_thread(self._read)
            if pinned is None:
                pinned = found
                await asyncio.to_thread(self._store.put, layout.TOOLS, json.dumps(pinned, indent=2).encode())
            elif changed := sorted(name for name in {*pinned, *found} if pinned.get(name) != found.get(name)):
                raise ToolFailure(
                    f"spec.tools: {', '.join(changed)}: the server lists other tools than at the start of the run; the "
                    f"tools of a run cannot change: start a new run, or pin the server's version "
                    f"({self._store.address(layout.TOOLS)} has the digests)",
                    code="tools_changed",
                )

    def _read(self) -> Mapping[str, str] | None:
        try:
            found: Mapping[str, str] = json.loads(self._store.get(layout.TOOLS))
        except StorageError as error:
            if error.code == "not_found":
                return None
            raise
        return found
