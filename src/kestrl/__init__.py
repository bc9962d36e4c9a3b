"""KestRL: reinforcement learning of tool-using language-model agents.

The names that agents, tools and rewards are written with. Each is loaded when it is first used, so that importing a
part of the package does not load the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrl.agents import Call, Conversation, LimitReached, Reply
    from kestrl.episode import CallOutcome, Episode, Group, Scenario, StopReason, ToolCall
    from kestrl.errors import KestrlError, UserInputError
    from kestrl.formats import ToolCallFormat
    from kestrl.rewards import Attempt, Score
    from kestrl.tools import Hidden, ToolError, ToolResult

__all__ = [
    "Attempt",
    "Call",
    "CallOutcome",
    "Conversation",
    "Episode",
    "Group",
    "Hidden",
    "KestrlError",
    "LimitReached",
    "Reply",
    "Scenario",
    "Score",
    "StopReason",
    "ToolCall",
    "ToolCallFormat",
    "ToolError",
    "ToolResult",
    "UserInputError",
]

_MODULES = {
    "kestrl.agents": ("Call", "Conversation", "LimitReached", "Reply"),
    "kestrl.episode": ("CallOutcome", "Episode", "Group", "Scenario", "StopReason", "ToolCall"),
    "kestrl.errors": ("KestrlError", "UserInputError"),
    "kestrl.formats": ("ToolCallFormat",),
    "kestrl.rewards": ("Attempt", "Score"),
    "kestrl.tools": ("Hidden", "ToolError", "ToolResult"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
