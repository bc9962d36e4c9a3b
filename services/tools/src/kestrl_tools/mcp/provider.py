"""The tools of an MCP server as a provider."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kestrl._shared.plan.settings.tools import McpEntry, ToolEntry
from kestrl.errors import ToolFailure, UserInputError
from kestrl.redaction import NO_SECRETS, Redactor
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition, kwargs_failure
from kestrl_tools.mcp.connection import Connection, Reconnecting
from kestrl_tools.mcp.results import result_of
from kestrl_tools.servers import ServerUnavailable, definitions, differences, left_out_by


class McpProvider:
    """A server, shared by all episodes or one per episode."""

    environment, has_state, has_prompt = True, False, False

    def __init__(self, entry: ToolEntry, server: McpEntry, folder: str | None, redactor: Redactor = NO_SECRETS) -> None:
        """Describes it.

        Args:
            entry: The entry of the manifest.
            server: Its server.
            folder: Working directory of the server's program; None for that of the service.
            redactor: Knows the server's credentials, which are kept out of its logged output.
        """
        self.name = entry.name
        self._wanted, self._left_out = entry.tools, left_out_by(entry)
        self._server = server
        self._folder, self._redactor = folder, redactor
        self._slots = asyncio.Semaphore(server.concurrency)
        self._tools: Sequence[ToolDefinition] = ()
        """The pinned tools: what the server listed first."""
        self._call_names: Mapping[str, str] = {}
        """The server's names of tools, by those for the model."""
        self._shared = Reconnecting(entry.name, self._connection, self._verify)

    async def list_tools(self) -> Sequence[ToolDefinition]:
        try:
            await self._shared.connection()
        except (ServerUnavailable, ToolFailure) as error:
            raise UserInputError(f"mcp: {error}") from error
        if self._server.per_episode:
            await self._shared.close()
        return self._tools

    def check(self, create_kwargs: Kwargs) -> None:
        if create_kwargs:
            raise kwargs_failure(self.name, "create_kwargs", "an MCP server takes none")

    async def start(self) -> None:
        return None

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        self.check(create_kwargs)
        if not self._server.per_episode:
            return _SharedSession(self._shared, self._slots, self._call_names)
        async with self._slots:
            connection = self._connection()
            await connection.open()
            try:
                await self._verify(connection)
            except BaseException:
                await asyncio.shield(connection.close())
                raise
            return _OwnSession(connection, self._call_names)

    def health(self) -> str:
        return self._shared.problem

    async def stop(self) -> None:
        await self._shared.close()

    def _connection(self) -> Connection:
        return Connection(self.name, self._server, self._folder, self._redactor)

    async def _verify(self, connection: Connection) -> None:
        """Pins the tools of the first connection, and compares those of a later one."""
        server_tools = await connection.list_tools()
        try:
            offered = await asyncio.to_thread(definitions, "mcp", self.name, server_tools, self._wanted, self._left_out)
        except UserInputError:
            if not self._tools:
                raise
            offered = []
        if not self._tools:
            self._tools, self._call_names = offered, {tool.name: tool.call_name for tool in server_tools}
        elif changed := differences(self._tools, offered):
            raise ToolFailure(
                f"{self.name}: the MCP server offers other tools than at the start of the service: {changed}; the "
                "tools of a run cannot change: start a new run, or pin the server's version",
                code="tools_changed",
            )


class _SharedSession:
    """An episode's use of the shared server, which keeps nothing of the episode."""

    prompt = ""

    def __init__(self, shared: Reconnecting, slots: asyncio.Semaphore, call_names: Mapping[str, str]) -> None:
        self._shared, self._slots, self._call_names = shared, slots, call_names

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        async with self._slots:
            connection = await self._shared.connection()
            return result_of(tool, await connection.call(self._call_names.get(tool, tool), {**arguments, **filled}))

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        return None


class _OwnSession:
    """A server of one episode."""

    prompt = ""

    def __init__(self, connection: Connection, call_names: Mapping[str, str]) -> None:
        self._connection, self._call_names = connection, call_names
        self._turn = asyncio.Lock()

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        async with self._turn:
            name = self._call_names.get(tool, tool)
            return result_of(tool, await self._connection.call(name, {**arguments, **filled}))

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        await self._connection.close()
