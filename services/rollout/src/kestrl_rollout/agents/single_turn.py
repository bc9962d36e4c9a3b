"""One prompt, one answer, no tools."""

from __future__ import annotations

from kestrl.agents import Conversation


async def single_turn(conversation: Conversation) -> None:
    """Samples one turn."""
    await conversation.generate()
