"""Received requests, and injected faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Request:
    """A received request."""

    verb: str
    """The verb as in RBAC: get, list, watch, create, update, patch, delete."""
    resource: str
    """The resource with its subresource: `deployments`, `agentrljobs/status`."""
    namespace: str
    name: str
    user: str
    """The bearer token; tokens are not checked."""
    at: float
    """Time of arrival, by the loop's clock."""
    accepts: str = ""
    """The Accept header."""
    dry_run: bool = False
    """Whether nothing is written."""
    body: Any = None
    status: int = 0
    """The status of the answer; 0 while there is none."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault of requests of a kind."""

    verb: str = "*"
    resource: str = "*"
    user: str | None = None
    name: str | None = None
    status: int | None = None
    """The status of the answer; None for the real answer."""
    message: str = "the fake API server was made to fail"
    retry_after: float | None = None
    """Seconds in the Retry-After header of a 429."""
    delay: float = 0.0
    """Seconds before the answer."""
    held: asyncio.Event | None = None
    """If given, the answer waits until it is set."""
    late: bool = False
    """Whether the request is carried out before the delay or the failure, so that only the answer is late or lost."""
    drop: bool = False
    """Whether the connection is closed without an answer."""
    dry_run: bool | None = None
    """Whether only dry runs match, or none; None for both."""
    left: int | None = None
    """Requests that it still applies to; None for all until `end`."""
    hits: int = 0

    def end(self) -> None:
        """Stops matching requests."""
        self.left = 0

    def meets(self, asked: Request) -> bool:
        return (
            self.left != 0
            and self.verb in {"*", asked.verb}
            and self.resource in {"*", asked.resource}
            and self.user in {None, asked.user}
            and self.name in {None, asked.name}
            and self.dry_run in {None, asked.dry_run}
        )

    def hit(self) -> None:
        self.hits += 1
        if self.left is not None:
            self.left -= 1
