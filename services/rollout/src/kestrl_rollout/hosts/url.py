"""A service that runs one episode for each POST."""

from __future__ import annotations

import aiohttp

from kestrl.agents.runs import RunResult, invalid
from kestrl.errors import UserCodeError, described
from kestrl_rollout.hosts.host import MAX_RESULT, RunEnded, RunRequest, read_result

AWAY = frozenset({429, 502, 503, 504})
"""Statuses of a service that may answer later."""


class UrlHost:
    """Posts every episode to a URL, once."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.field = "agent.url"
        self.name = self._url = url
        self._session = session

    async def run(self, request: RunRequest) -> RunResult:
        title = f"{self.field} {self.name}"
        try:
            async with self._session.post(
                self._url,
                data=request.to_json(),
                headers={"content-type": "application/json"},
                allow_redirects=False,
            ) as response:
                status, body = response.status, await _read(response)
        except aiohttp.ClientError as error:
            raise RunEnded(f"{title}: {described(error)}", code="agent_unreachable", retryable=True) from error
        if len(body) > MAX_RESULT:
            raise invalid(title, f"its result has more than {MAX_RESULT} bytes")
        if 200 <= status < 300:
            return read_result(title, body) if body.strip() else RunResult()
        raise self._failed(status, body)

    def _failed(self, status: int, body: bytes) -> RunEnded:
        """The end of a run that was answered with an error."""
        return http_end(f"{self.field} {self.name}", status, body)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, at most a byte more than may be."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > MAX_RESULT:
            break
    return bytes(body[: MAX_RESULT + 1])


def http_end(title: str, status: int, body: bytes) -> RunEnded:
    """The end of a run that a service has answered with an error."""
    names = [f"http:{status}"]
    text = body[:500].decode("utf-8", "replace")
    if body.lstrip().startswith(b"{"):
        try:
            read_result(title, body)
        except RunEnded as end:
            return RunEnded(f"{end} (status {status})", names=[*end.names, *names], code=end.code)
        except UserCodeError:
            pass  # an error in a form of its own
    return RunEnded(
        f"{title}: answered {status}: {text}", names=names, code="agent_http_error", retryable=status in AWAY
    )
