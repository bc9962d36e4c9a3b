"""The e-mail tools with delays: 2 s per call, one in five 10 s, drawn from a seed so that every run has the same
delays."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from kestrl_email import tools


class _Slow:
    def __init__(self, *, database: str, inbox: str) -> None:
        self._tool = type(self).tool(database=database, inbox=inbox)  # type: ignore[attr-defined]
        self._chance = random.Random(f"{inbox}/{type(self).__name__}")

    async def _late(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(10.0 if self._chance.random() < 0.2 else 2.0)
        return self._tool(*arguments, **named)

    def close(self) -> None:
        close = getattr(self._tool, "close", None)
        if close is not None:
            close()


class SearchEmails(_Slow):
    """Search the mailbox."""

    tool = tools.SearchEmails

    async def __call__(self, keywords: list[str]) -> Any:
        """Find mails that contain all keywords.

        Args:
            keywords: Words that must all occur.
        """
        return await self._late(keywords)


class ReadEmail(_Slow):
    """Read one mail."""

    tool = tools.ReadEmail

    async def __call__(self, message_id: str) -> Any:
        """Read a mail whole.

        Args:
            message_id: As search_emails gave it.
        """
        return await self._late(message_id)
