"""Given ids of a root span, so that the trace of an object can be derived from the object."""

from __future__ import annotations

import hashlib
import os
from contextvars import ContextVar

ROOT: ContextVar[tuple[int, int] | None] = ContextVar("root", default=None)
"""Trace id and span id of the next root span; None means random ids."""
_PROCESS = os.urandom(16)


def ids_of(key: str) -> str:
    """The W3C context of the trace that this process begins for a key, such as the id of a group. Another process that
    does the same work again begins another one.
    """
    digest = hashlib.sha256(_PROCESS + key.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"
