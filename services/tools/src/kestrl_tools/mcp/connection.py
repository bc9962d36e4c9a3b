"""A connection to an MCP server: opened on demand, opened again with back-off after it was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, TypeVar

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from yarl import URL

from kestrl._shared.backoff import Backoff
from kestrl._shared.bounded_answers import MAX_MESSAGE, bound
from kestrl._shared.plan.settings.tools import McpEntry
from kestrl.errors import KestrlError, ToolFailure, described, text_of
from kestrl.redaction import NO_SECRETS, Redactor
from kestrl.tools import ToolError
from kestrl_tools.mcp.bounds import Flood
from kestrl_tools.mcp.refusals import CALL, HANDSHAKE, LIST, Refusals
from kestrl_tools.mcp.sdk import TransportStreams, create_mcp_http_client
from kestrl_tools.mcp.stdio import McpProgram, stdio_transport
from kestrl_tools.servers import MAX_TOOLS, ListedTool, ServerUnavailable, callable_name, secret_header, secret_text

log = logging.getLogger(__name__)
CONNECT_SECONDS = 30.0
"""Time limit of starting a server and of its handshake."""
CLOSE_SECONDS = 10.0
DRAIN_SECONDS = 60.0
"""Time for the calls of a program that is replaced, since its credentials have changed."""
MAX_PAGES = 100
"""Maximum pages of a list of tools."""
BACKOFF = Backoff(0.25, 10.0)
"""Pauses between attempts to connect."""
Answer = TypeVar("Answer")
LOST = frozenset({types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT})
"""Error codes of the SDK for a lost connection."""
SESSION_GONE = "Session terminated"
"""Message of the SDK when an HTTP server no longer knows the session, as after its restart."""


def leaf_of(error: BaseException) -> BaseException:
    """The first exception that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return error  # pyright: ignore[reportUnknownVariableType]


class Connection:
    """One connection. Its streams belong to a task of its own, since anyio's scopes must be left where they began."""

    def __init__(self, name: str, entry: McpEntry, folder: str | None, redactor: Redactor = NO_SECRETS) -> None:
        """Describes it.

        Args:
            name: Name of the provider.
            entry: The server.
            folder: Working directory of its program; None for that of the service.
            redactor: Knows its credentials, which are kept out of its logged output.
        """
        self._name, self._redactor = name, redactor
        self._entry = entry
        self._folder = folder
        self._closing = asyncio.Event()
        self._session: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._program: McpProgram | None = None
        self._flood, self._flooded = Flood(), False
        self._refusals = Refusals(name, entry)
        self._variables: Mapping[str, str] | None = None
        """Secrets that the program began with."""
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.lost = False
        """Whether a call found the connection lost."""
        self.list_changed = False
        """Whether the server announced another list of tools since it was read."""

    async def open(self) -> None:
        """Connects and shakes hands.

        Raises:
            ServerUnavailable: The server cannot be started or reached, or does not speak the protocol.
            ToolFailure: It refuses the manifest's credential.
        """
        self._task = asyncio.create_task(self._serve(), name=f"mcp-{self._name}")
        self._task.add_done_callback(_retrieved)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                started: set[asyncio.Future[Any]] = {self._session, self._task}
                await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            problem = f"no handshake within {CONNECT_SECONDS:g} s"
        except asyncio.CancelledError:
            await asyncio.shield(self.close())
            raise
        else:
            if self._session.done():
                return
            error = self._task.exception()
            problem = "it closed the connection" if error is None else described(leaf_of(error))
        await self.close()
        if self._refusals.count(HANDSHAKE):
            raise self._refusals.failure()
        raise ServerUnavailable(f"{self._name}: the MCP server cannot be used: {problem}{self._ending()}")

    async def close(self) -> None:
        """Ends the connection, and the program with its descendants."""
        self._closing.set()
        if self._task is not None:
            _, running = await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
            if running:
                self._task.cancel()
                await asyncio.wait(running, timeout=CLOSE_SECONDS)

    @property
    def outdated(self) -> bool:
        """Whether the program began with credentials that have changed since."""
        return self._variables is not None and self._variables != self._secret_variables()

    async def drain(self) -> None:
        """Waits for the end of the present calls, at most `DRAIN_SECONDS`."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            log.warning("MCP server %s: is started again amid %d calls", self._name, self._running)

    async def list_tools(self) -> list[ListedTool]:
        """All tools of the server.

        Raises:
            KestrlError: As `call` does.
        """
        self.list_changed = False
        tools: list[ListedTool] = []
        cursor: str | None = None
        size = 0
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._page(params)
            tools += [_tool(tool) for tool in page.tools]
            size += len(page.model_dump_json())
            cursor = page.next_cursor
            if len(tools) > 10 * MAX_TOOLS or size > MAX_MESSAGE:
                break
            if cursor is None:
                return tools
        raise ToolFailure(f"{self._name}: its list of tools does not end, or is too long", code="tool_result_invalid")

    async def _page(self, params: types.PaginatedRequestParams | None = None) -> types.ListToolsResult:
        """A page of the list of tools."""
        refusals = self._refusals.count(LIST)
        try:
            return await self._asked(self._session.result().list_tools(params=params))
        except KestrlError as error:
            if self._refusals.count(LIST) > refusals:
                raise self._refusals.failure() from error
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Calls a tool; a cancelled call is cancelled on the server, too.

        Raises:
            ServerUnavailable: The connection was lost.
            ToolError: The server refuses the arguments.
            ToolFailure: The server answers with an error or an invalid result, or refuses the manifest's credential.
        """
        headers, refusals = self._secret_headers(), self._refusals.count(CALL)
        try:
            return await self._asked(self._session.result().call_tool(tool, dict(arguments)), tool)
        except (KestrlError, ToolError) as error:
            if self._refusals.count(CALL) > refusals and await self._is_refused(headers):
                raise self._refusals.failure() from error
            raise

    async def _is_refused(self, headers: Mapping[str, str]) -> bool:
        """Whether the credential of a refused call, in these headers, is to blame: it has changed since, or is refused
        for a request that no model can change, too.
        """
        async with self._refusals.proving:
            if self._secret_headers() != headers:
                return True
            refusals = self._refusals.count(LIST)
            with suppress(KestrlError):
                await self._page()
            return self._refusals.count(LIST) > refusals

    async def _asked(self, work: Awaitable[Answer], tool: str = "") -> Answer:
        self._running += 1
        self._idle.clear()
        try:
            return await self._answered(work, tool)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _answered(self, work: Awaitable[Answer], tool: str) -> Answer:
        try:
            return await work
        except MCPError as error:
            if error.code in LOST or error.message == SESSION_GONE:
                self.lost = True
                raise ServerUnavailable(f"{self._name}: the MCP server was lost{self._ending()}") from error
            if error.code == types.PARSE_ERROR:
                raise self._invalid(tool, error.message[:500]) from error
            if error.code == types.INVALID_PARAMS and tool:
                raise ToolError(error.message) from error
            raise ToolFailure(f"{self._name}: {tool}: the MCP server reports {error.code}: {error.message}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise self._invalid(tool, f"{place}: {first['msg']}") from error
        except RuntimeError as error:  # of the SDK's checks of a result
            raise self._invalid(tool, text_of(error)) from error

    def _invalid(self, tool: str, reason: str) -> ToolFailure:
        subject = f"the result of {tool}" if tool else "its list of tools"
        return ToolFailure(f"{self._name}: {subject} is invalid: {reason}", code="tool_result_invalid")

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            read, write = await stack.enter_async_context(self._transport())
            client = types.Implementation(name="kestrl", version=version("kestrl"))
            session = ClientSession(read, write, client_info=client, message_handler=self._notified)
            await stack.enter_async_context(session)
            await session.initialize()
            self._session.set_result(session)
            await self._closing.wait()

    @asynccontextmanager
    async def _transport(self) -> AsyncGenerator[TransportStreams]:
        entry = self._entry
        if entry.url is None:
            self._variables = self._secret_variables()
            variables = {**entry.env, **self._variables}
            self._program = McpProgram.start(self._name, entry.command, variables, self._folder, self._redactor)
            async with stdio_transport(self._program) as streams:
                yield streams
        else:
            headers = {"Accept-Encoding": "identity", **entry.headers, **self._secret_headers()}
            async with (
                create_mcp_http_client(headers=headers) as client,
                streamable_http_client(entry.url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
            ):
                # Nothing is sent before there is a session.
                client.event_hooks = {"request": [self._authenticate], "response": [bound, self._refusals.note]}
                yield streams

    def _secret_variables(self) -> dict[str, str]:
        return {name: secret_text("mcp", text) for name, text in self._entry.secret_env.items()}

    def _secret_headers(self) -> dict[str, str]:
        return {name: secret_header("mcp", text) for name, text in self._entry.secret_headers.items()}

    async def _authenticate(self, request: Any) -> None:
        """Gives a request the present entries of secrets, unless it was redirected to another server."""
        if URL(str(request.url)).origin() == URL(self._entry.url or "").origin():
            request.headers.update(self._secret_headers())

    async def _notified(self, message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.list_changed = True
        if self._flood.rises() and not self._closing.is_set():
            self.lost = self._flooded = True
            log.error("MCP server %s: sends more notifications than are read; the connection is closed", self._name)
            self._closing.set()

    def _ending(self) -> str:
        """How the program ended, and the last that it wrote."""
        if self._flooded:
            return ": it sends more notifications than are read"
        if self._program is None:
            return f" ({self._entry.url})"
        code, line = self._program.exit_code, self._program.last_line
        exit_text = "" if code is None else f"; it exited with {code}"
        return f"{exit_text}; its last output: {line}" if line else exit_text


def _tool(tool: types.Tool) -> ListedTool:
    return ListedTool(callable_name(tool.name), tool.description or "", tool.input_schema, tool.name)


def _retrieved(work: asyncio.Task[Any]) -> None:
    """Retrieves an exception that callers may not wait for, so that asyncio does not report it."""
    if not work.cancelled():
        work.exception()


class Reconnecting:
    """The connection that all sessions share: one attempt to connect at a time, with back-off between attempts."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Connection],
        verify: Callable[[Connection], Awaitable[None]],
    ) -> None:
        """Describes it.

        Args:
            name: Name of the provider.
            make: Makes a connection that is not open.
            verify: Checks a new connection, and one whose server announced another list; raises KestrlError.
        """
        self._name, self._make, self._verify = name, make, verify
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._attempts = 0
        """Attempts to connect since the last one that succeeded."""
        self._closed = False
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""

    async def connection(self) -> Connection:
        """A usable connection.

        Raises:
            ServerUnavailable: The server cannot be reached; a retry may succeed.
            KestrlError: It offers other tools than it did.
        """
        current = self._connection
        if current is not None and not current.lost and not current.outdated:
            if current.list_changed:
                await self._checked(current)
            return current
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name=f"mcp-{self._name}-connect")
            self._connecting.add_done_callback(_retrieved)
        await asyncio.wait({self._connecting})  # shared: a caller that is cancelled does not end the attempt
        return self._connecting.result()

    async def _connect(self) -> Connection:
        if self._closed:
            raise ServerUnavailable(f"{self._name}: the tool service is shutting down")
        await self._retire()
        await asyncio.sleep(BACKOFF.pause(self._attempts))
        self._attempts += 1
        connection = self._make()
        try:
            await connection.open()
            await self._checked(connection)
        except KestrlError as error:
            self.problem = str(error)
            log.error("%s", error)
            await connection.close()
            raise
        self._connection, self._attempts, self.problem = connection, 0, ""
        return connection

    async def _checked(self, connection: Connection) -> None:
        try:
            await self._verify(connection)
        except KestrlError as error:
            self.problem = str(error)
            raise

    async def _retire(self) -> None:
        """Closes the last connection; one that can be used ends its calls before."""
        if self._connection is not None and not self._connection.lost:
            log.info("MCP server %s: is started again, since its credentials have changed", self._name)
            self._attempts = 0
            await self._connection.drain()
        await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        await self._drop()
