"""An agent, or an environment that runs its episodes itself, in pods of its own: the same hosts as beside a worker,
behind a POST for each episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp

from kestrl.agents.runs import RunResult
from kestrl.errors import UserCodeError, UserInputError, described
from kestrl_rollout.hosts.host import RunEnded, RunRequest
from kestrl_rollout.hosts.url import UrlHost, http_end

log = logging.getLogger(__name__)
START_SECONDS = 1200.0
"""Time in which the first pod has to have pulled its image and loaded what it runs."""
RECONNECT_SECONDS = 60.0
"""Time for a connection, as while the pods are replaced."""
POLL_SECONDS = 1.0
NOT_RUN = "http:503"
"""Answer of a pod that is full, or ends."""


class PodsHost(UrlHost):
    """Posts every episode to the pods that run it. Waits for a connection, but sends no episode twice."""

    def __init__(self, field: str, name: str, url: str, session: aiohttp.ClientSession) -> None:
        """Describes it.

        Args:
            field: The manifest field of what runs the episodes.
            name: The agent or task set as in that field.
            url: URL of the pods.
            session: The client.
        """
        super().__init__(url, session)
        self.field, self.name = field, name

    async def started(self, health_path: str) -> None:
        """Returns once a pod has loaded the agent.

        Raises:
            UserInputError: None has in time.
        """
        last = ""
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    try:
                        async with self._session.get(f"{self._url}{health_path}") as response:
                            if response.status == 200:
                                return
                            last = f"it answered {response.status}"
                    except aiohttp.ClientError as error:
                        last = described(error)
                    log.debug("%s is waited for: %s", self.field, last)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            image = f"spec.{self.field.partition('.')[0]}.image"
            raise UserInputError(
                f"{image}: no pod has loaded {self.field} {self.name} within {START_SECONDS:g} s ({last}); the pods' "
                "logs say more"
            ) from None

    async def run(self, request: RunRequest) -> RunResult:
        deadline = asyncio.get_running_loop().time() + RECONNECT_SECONDS
        while True:
            try:
                return await super().run(request)
            except RunEnded as end:
                # Without a connection nothing was sent, and a pod that is full or ends has run nothing.
                refused = isinstance(end.__cause__, aiohttp.ClientConnectorError) or NOT_RUN in end.names
                if not refused or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    def _failed(self, status: int, body: bytes) -> RunEnded:
        """The end as the host in the pod has described it.

        Raises:
            UserCodeError: The run returned what is no result.
        """
        try:
            end: Any = json.loads(body)["error"]
            message, code = str(end["message"]), str(end["code"])
            if end["invalid"]:
                raise UserCodeError(message, code=code)
            names = [str(name) for name in end["types"]]
            return RunEnded(message, names=names, code=code, retryable=bool(end["retryable"]))
        except (ValueError, TypeError, KeyError):
            return http_end(f"{self.field} {self.name}", status, body)  # not of our server
