"""System messages for templates that have one place for them: at the beginning. Pure.

Claude Code and Codex send several, also behind the user's first message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.text.chat import Chat, Message
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl.errors import UserInputError

SEVERAL = tuple(Message(role=role, text="Some text.") for role in ("system", "system", "user", "system"))
BETWEEN = "\n\n"


def takes_several(chat: Chat) -> bool:
    """Whether a chat template has a place for system messages wherever they stand."""
    try:
        chat.text(SEVERAL, NO_TOOLS)
    except UserInputError:
        return False
    return True


def joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with at most one of the system, the first: those that follow it are its further paragraphs, and
    later ones are paragraphs of the user's message beside them.
    """
    placed: list[Mapping[str, Any]] = []
    open_role = ""
    """Role of the last message while the next system message joins it."""
    from_system = False
    """Whether the last message is a later one of the system alone, which the user's next message joins."""
    for message in messages:
        role = message["role"]
        if (role == "system" and open_role) or (role == "user" and from_system):
            last = placed[-1]
            placed[-1] = {**last, "content": f"{last['content']}{BETWEEN}{message['content']}"}
            from_system = from_system and role == "system"
        elif role == "system" and placed:
            placed.append({"role": "user", "content": message["content"]})
            open_role, from_system = "user", True
        else:
            placed.append(message)
            open_role, from_system = (role if role in ("system", "user") else ""), False
    return placed
