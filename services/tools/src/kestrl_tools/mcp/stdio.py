"""The program of an MCP server on stdio: started with a process guard, its stderr in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from kestrl._shared.bounded_answers import MAX_MESSAGE
from kestrl._shared.processes.guarded import GuardedProcess, kept_variables
from kestrl.data.values import MAX_VALUES, exceeds_values
from kestrl.redaction import Redactor
from kestrl_tools.mcp.sdk import TransportStreams

log = logging.getLogger(__name__)
ANSWERED = re.compile(rb'"id"\s*:\s*([0-9]{1,18})\b')
MAX_LOGGED = 1000
"""Maximum characters of a logged line of stderr."""
CLOSE_SECONDS = 2.0
"""Time for the program to exit after its stdin was closed; it is killed then."""
EXIT_SECONDS = 1.0
"""Time for the program to exit after the end of its stdout, before its calls fail."""


class McpProgram:
    """A running program."""

    def __init__(self, name: str, guarded: GuardedProcess, redactor: Redactor) -> None:
        self._name, self._redactor = name, redactor
        self._guarded, self._process = guarded, guarded.process
        self.last_line = ""
        """Last line that it wrote to stderr."""

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], variables: Mapping[str, str], folder: str | None, redactor: Redactor
    ) -> McpProgram:
        """Starts a program in a folder, with the given variables and those of `KEPT_VARIABLES`; credentials that the
        redactor knows are kept out of its logged output.

        Raises:
            OSError: The process cannot be started.
        """
        guarded = GuardedProcess.start(
            command,
            variables={**kept_variables(), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            folder=folder,
        )
        return cls(name, guarded, redactor)

    async def read(self, deliver: Any) -> None:
        """Delivers the messages on stdout until its end."""
        reader = asyncio.StreamReader(limit=MAX_MESSAGE)
        transport = await _reading(reader, self._process.stdout)
        try:
            async with deliver:
                while line := await reader.readline():
                    await deliver.send(self._message(line))
                await self._exit_seen()  # a process closes its files before its exit code can be read
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return  # the session is closed
        except ValueError:  # of StreamReader.readline
            log.error("MCP server %s: sent a message above %d bytes; the connection is closed", self._name, MAX_MESSAGE)
        finally:
            transport.close()

    async def _exit_seen(self) -> None:
        """Waits until the program, whose stdout has ended, has exited; at most `EXIT_SECONDS`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, EXIT_SECONDS)

    def _message(self, line: bytes) -> SessionMessage | Exception:
        try:
            if exceeds_values(line):
                raise ValueError(f"it has more than {MAX_VALUES} values")
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:
            text = self._redactor.text(line[:4096].decode("utf-8", "replace"))
            log.warning("MCP server %s: wrote to stdout what is not a message: %.200r", self._name, text)
            return _invalid_answer(line, error) or error

    async def write(self, messages: Any) -> None:
        """Writes messages to stdin until there are no more."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop=loop), self._process.stdin
        )
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            async with messages:
                async for message in messages:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    writer.write(text.encode() + b"\n")
                    await writer.drain()
        except (ConnectionError, RuntimeError) as error:
            log.debug("MCP server %s: stdin is closed: %s", self._name, error)
        finally:
            transport.close()

    async def log_errors(self) -> None:
        """Logs the lines on stderr until its end."""
        reader = asyncio.StreamReader(limit=MAX_LOGGED)
        transport = await _reading(reader, self._process.stderr)
        try:
            while line := await _line(reader):
                text = self._redactor.text(line.decode("utf-8", "replace").rstrip()[:MAX_LOGGED])
                if text:
                    self.last_line = text
                    log.info("MCP server %s: %s", self._name, text)
        finally:
            transport.close()

    async def stop(self) -> None:
        """Waits for the program, whose stdin is closed, and kills what is left of it."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        finally:
            await self._guarded.kill()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()


def _invalid_answer(line: bytes, error: ValueError) -> SessionMessage | None:
    """An error in place of an answer that cannot be read, so that its request does not wait until its deadline."""
    number = ANSWERED.search(line)
    if number is None or b'"method"' in line:
        return None
    reason = str(error.errors(include_url=False)[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    problem = ErrorData(code=PARSE_ERROR, message=reason[:200])
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=problem))


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, or the beginning of one that is too long; empty at the end."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.read(max(error.consumed, 1))


async def _reading(reader: asyncio.StreamReader, pipe: Any) -> asyncio.ReadTransport:
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return transport


@asynccontextmanager
async def stdio_transport(program: McpProgram) -> AsyncGenerator[TransportStreams]:
    """The message streams of a program, which is stopped at the end."""
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    reading = asyncio.create_task(program.read(incoming), name="mcp-stdout")
    writing = asyncio.create_task(program.write(outgoing), name="mcp-stdin")
    logging_ = asyncio.create_task(program.log_errors(), name="mcp-stderr")
    try:
        yield read_stream, write_stream
    finally:
        read_stream.close()
        write_stream.close()
        await asyncio.wait({writing}, timeout=CLOSE_SECONDS)  # it closes stdin
        writing.cancel()
        await program.stop()
        reading.cancel()
        await asyncio.wait({reading, writing, logging_}, timeout=CLOSE_SECONDS)
        logging_.cancel()
        for stream in (incoming, outgoing):
            stream.close()
