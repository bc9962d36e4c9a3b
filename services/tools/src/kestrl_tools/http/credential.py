"""Whether a server refuses a call, or the credential of the manifest: a 401 alone does not say which.

The model chooses what is called, so that its own calls must not be able to end an episode as a failure. What proves the
credential to be refused is that a request which was accepted with it is refused, too: one that no model can change any
more, without cookies of an episode, and a GET, which may be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kestrl_tools.http.client import Response
from kestrl_tools.http.requests import HttpRequest

UNAUTHORIZED = 401
POLL_SECONDS = 0.5
"""Interval at which a changed credential is looked for."""


class AcceptedRequest:
    """The last request that proves, by being repeated, whether the credential is accepted."""

    def __init__(self) -> None:
        self._request: HttpRequest | None = None
        self._asking = asyncio.Lock()

    def note(self, request: HttpRequest, response: Response, *, plain: bool) -> None:
        """Takes note of a response.

        Args:
            request: What was sent.
            response: What came back.
            plain: Whether it was sent without anything of an episode, such as a cookie.
        """
        if plain and request.method == "GET" and response.authorized and 200 <= response.status < 300:
            self._request = request

    async def is_refused(self, ask: Callable[[HttpRequest], Awaitable[Response]]) -> bool:
        """Whether a request that was accepted is refused now; False if none ever was.

        Args:
            ask: Sends a request with the credential that was refused.
        """
        if self._request is None:
            return False
        async with self._asking:  # one at a time, however many calls are refused
            return (await ask(self._request)).status == UNAUTHORIZED
