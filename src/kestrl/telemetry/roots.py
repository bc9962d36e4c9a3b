"""Ids of a root span that are chosen, not drawn: whoever knows what a trace is about can then name it without a memory."""

from __future__ import annotations

from contextvars import ContextVar

ROOT: ContextVar[tuple[int, int] | None] = ContextVar("root", default=None)
"""Trace id and span id of the next span that has no parent; None draws them."""
