"""Whether an MCP server over HTTP refuses a call, or the credential of the manifest: a 401 alone does not say which.

The model chooses what is called, so that its own calls must not be able to have an episode begin again. What proves the
credential to be refused is a 401 to a request that no model can change: the handshake, or the list of tools.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx2
from yarl import URL

from kestrl._shared.plan.settings.tools import McpEntry
from kestrl.errors import ToolFailure

UNAUTHORIZED = 401
HANDSHAKE, LIST, CALL = "initialize", "tools/list", "tools/call"
"""Methods of the protocol whose refusals are counted separately."""


class Refusals:
    """The answers 401 of a server to requests with the manifest's credential, counted by the protocol's method."""

    def __init__(self, name: str, entry: McpEntry) -> None:
        self._name = name
        self._origin = URL(entry.url).origin() if entry.url and entry.secret_headers else None
        self._counts: Counter[str] = Counter()
        self.proving = asyncio.Lock()
        """Held while a proof is asked for: one at a time, however many calls are refused."""

    def count(self, method: str) -> int:
        """Refusals of a method so far."""
        return self._counts[method]

    async def note(self, response: httpx2.Response) -> None:
        """Takes note of an answer: a hook of the client."""
        request = response.request
        if response.status_code != UNAUTHORIZED or request.method != "POST":
            return
        if URL(str(request.url)).origin() == self._origin:
            self._counts[json.loads(await request.aread()).get("method", "")] += 1

    def failure(self) -> ToolFailure:
        """The failure of what needs the credential."""
        message = (
            f"{self._name}: the MCP server refuses the credential of mcp.secretHeaders (401); put one that it accepts "
            "into the Secret"
        )
        return ToolFailure(message, code="tool_unauthorized", retryable=True)
