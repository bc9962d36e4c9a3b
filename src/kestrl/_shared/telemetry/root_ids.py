"""Given ids of a root span, so that the trace of an object can be derived from the object."""

from __future__ import annotations

from contextvars import ContextVar

ROOT: ContextVar[tuple[int, int] | None] = ContextVar("root", default=None)
"""Trace id and span id of the next root span; None means random ids."""
