"""What was asked of the server, and what is to go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Request:
    """A request that was received."""

    verb: str
    """As RBAC names it: get, list, watch, create, update, patch, delete."""
    resource: str
    """With its subresource: `deployments`, `agentrljobs/status`."""
    namespace: str
    name: str
    user: str
    """Who: the bearer token as it was sent, since tokens are not checked."""
    at: float
    """By the loop's clock."""
    accepts: str = ""
    """The forms of an answer that it takes."""
    dry_run: bool = False
    """Whether nothing is written."""
    body: Any = None
    status: int = 0
    """What was answered; 0 while nothing is."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong with requests of a kind."""

    verb: str = "*"
    resource: str = "*"
    user: str | None = None
    name: str | None = None
    status: int | None = None
    """What is answered instead; None: the real answer."""
    message: str = "the fake API server was told to fail"
    retry_after: float | None = None
    """Seconds, as the header of a 429 says."""
    delay: float = 0.0
    """Seconds before the answer."""
    late: bool = False
    """Whether the request is carried out before the delay or the failure: then only the answer is late, or lost."""
    drop: bool = False
    """Whether the connection is closed without an answer."""
    dry_run: bool | None = None
    """Whether it meets dry runs alone, or none of them; None: both."""
    left: int | None = None
    """Requests that it still meets; None for all until `end`."""
    hits: int = 0

    def end(self) -> None:
        """Meets no more requests."""
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
