"""Programs of agents: under a process guard, their output bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from kestrl._shared.processes.guarded import GuardedProcess

CHUNK = 64 * 1024


class Program(GuardedProcess):
    """A running program; `kill` ends it with all its descendants."""

    async def output(self, limit: int, error_limit: int) -> tuple[bytes, bytes]:
        """The ends of stdout and stderr, at most so many bytes of each, once all its processes have ended."""
        out, errors = await asyncio.gather(_tail(self.process.stdout, limit), _tail(self.process.stderr, error_limit))
        await asyncio.to_thread(self.process.wait)  # at once: the guard has closed its files
        return out, errors


async def _tail(pipe: Any, limit: int) -> bytes:
    """The last bytes of a pipe, at its end."""
    reader = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    tail = bytearray()
    try:
        while chunk := await reader.read(CHUNK):
            tail += chunk
            if len(tail) > 2 * limit:
                del tail[:-limit]
    finally:
        transport.close()
    return bytes(tail[-limit:])
