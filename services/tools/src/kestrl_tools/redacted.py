"""A provider without the credentials of its server: what the server answers, lists or fails with goes to the model,
into stored episodes and into logs, and a server may repeat what it was sent.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.user_secrets import PresentRedactor, user_secret
from kestrl.errors import KestrlError, ToolFailure, described
from kestrl.redaction import Redactor
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition, ToolProvider

log = logging.getLogger(__name__)


def redactor_of(entry: ToolEntry) -> Redactor:
    """Knows the credentials that the entry's server is sent."""
    texts = [] if entry.http is None else [*entry.http.secret_headers.values()]
    if entry.mcp is not None:
        texts += [*entry.mcp.secret_headers.values(), *entry.mcp.secret_env.values()]
    return PresentRedactor(lambda: [user_secret(text.variable) or "" for text in texts])


class RedactedProvider:
    """Passes everything on to a provider, and what comes back without credentials."""

    def __init__(self, provider: ToolProvider, redactor: Redactor) -> None:
        self._provider, self._redactor = provider, redactor
        self.name = provider.name
        self.environment = provider.environment
        self.has_state, self.has_prompt = provider.has_state, provider.has_prompt

    async def list_tools(self) -> Sequence[ToolDefinition]:
        with redacted_errors(self._redactor):
            definitions = await self._provider.list_tools()
        return [self._definition(tool) for tool in definitions]

    def _definition(self, tool: ToolDefinition) -> ToolDefinition:
        schema = tool.schema
        parameters: Mapping[str, Any] = self._redactor.value(schema.parameters)
        redacted = replace(schema, description=self._redactor.text(schema.description), parameters=parameters)
        return replace(tool, schema=redacted)

    def check(self, create_kwargs: Kwargs) -> None:
        self._provider.check(create_kwargs)

    async def start(self) -> None:
        with redacted_errors(self._redactor):
            await self._provider.start()

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        with redacted_errors(self._redactor):
            return _Session(await self._provider.open(create_kwargs), self._redactor)

    def health(self) -> str:
        return self._redactor.text(self._provider.health())

    async def stop(self) -> None:
        with redacted_errors(self._redactor):
            await self._provider.stop()


class _Session:
    def __init__(self, session: ProviderSession, redactor: Redactor) -> None:
        self._session, self._redactor = session, redactor

    @property
    def prompt(self) -> str:
        return self._redactor.text(self._session.prompt)

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        with redacted_errors(self._redactor):
            result = await self._session.call(tool, arguments, filled)
        if isinstance(result, ToolResult):
            data: Mapping[str, Any] = self._redactor.value(result.data)
            return replace(result, text=self._redactor.text(result.text), data=data)
        return self._redactor.value(result)

    async def state(self) -> object:
        with redacted_errors(self._redactor):
            return self._redactor.value(await self._session.state())

    async def close(self) -> None:
        with redacted_errors(self._redactor):
            await self._session.close()


@contextmanager
def redacted_errors(redactor: Redactor) -> Generator[None]:
    """Takes the credentials out of the messages of errors.

    Raises:
        ToolFailure: Something untyped was raised, whose text and causes may have them.
    """
    try:
        yield
    except (KestrlError, ToolError) as error:
        error.args = tuple(
            redactor.text(argument) if isinstance(argument, str) else argument for argument in error.args
        )
        raise
    except Exception as error:  # noqa: BLE001 - converted: any of them may quote what the server sent
        text = redactor.text("".join(traceback.format_exception(error)))
        log.error("a provider raised: %s", text)
        raise ToolFailure(redactor.text(described(error))) from None
