"""The loop of an environment that runs its episodes itself, over the conversation that it samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kestrl._shared.plan.settings.rollout import OutsideEnvironment
from kestrl.agents import Conversation
from kestrl.agents.runs import RunResult, row_of
from kestrl.episode import ENVIRONMENT_REWARD, ENVIRONMENT_WEIGHTS, StopReason
from kestrl.errors import Boundary, KestrlError, UserCodeError
from kestrl_rollout.agents.loading import EnvironmentResult
from kestrl_rollout.conversation.episode_conversation import EpisodeConversation
from kestrl_rollout.hosts.comparison import difference
from kestrl_rollout.hosts.environment_process import FIELD
from kestrl_rollout.hosts.host import Host, RunEnded, RunRequest

CODES: Mapping[str, str] = {
    "agent_process_ended": "process_died",
    "agent_not_started": "not_started",
    "agent_unreachable": "unreachable",
}
"""Codes of failures of an environment by those of a host of agents."""
STOPS: Mapping[str, StopReason] = {
    "max_turns": StopReason.MAX_TURNS,
    "max_input_tokens": StopReason.MAX_TOKENS,
    "max_output_tokens": StopReason.MAX_TOKENS,
    "max_total_tokens": StopReason.MAX_TOKENS,
}
"""Stop reasons by verifiers' own, of which others are an answer."""


class EnvironmentLoop:
    """Has a host run episodes, of which it plays a bounded number at the same time."""

    def __init__(self, host: Host, settings: OutsideEnvironment) -> None:
        self._host, self._settings = host, settings
        self._places = asyncio.Semaphore(settings.sessions)

    async def run(self, conversation: Conversation) -> EnvironmentResult:
        """Runs an episode.

        Raises:
            KestrlError: It failed, by the environment's fault.
        """
        assert isinstance(conversation, EpisodeConversation)
        async with self._place(), conversation.serve() as endpoint:
            request = RunRequest(
                row=row_of(conversation.scenario),
                base_url=endpoint.base_url,
                key=endpoint.api_key,
                mcp_url=endpoint.mcp_url,
                deadline=conversation.deadline,
                config={},
            )
            try:
                returned = await self._host.run(request)
            except RunEnded as end:
                code = CODES.get(end.code, "raised")
                raise self._failure(str(end), code, retryable=end.retryable) from end
            except UserCodeError as error:  # it is no result
                raise self._failure(str(error), "result_invalid") from error
        return self._result(conversation, returned)

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        seconds = self._settings.wait_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
        except TimeoutError:
            message = f"all {self._settings.sessions} sessions were busy for {seconds:g} s"
            raise self._failure(message, "capacity", retryable=True) from None
        try:
            yield
        finally:
            self._places.release()

    def _result(self, conversation: EpisodeConversation, returned: RunResult) -> EnvironmentResult:
        info: Mapping[Any, Any] = returned.info
        if "failed" in info:
            message = str(info.get("message", ""))
            if conversation.limit is not None:
                message = f"a call was refused, since {conversation.limit} of the episode was reached; {message}"
            raise self._failure(message, str(info["failed"]))
        differs = difference(info["sampled"], conversation.turns)
        if differs is not None:
            raise self._failure(differs, "rows_differ")
        if not conversation.turns:
            raise self._failure("the episode ended without a call of the model", "made_no_call")
        if (reason := STOPS.get(info["stop"])) is not None:
            conversation.stop(reason)
        conversation.metrics.update(returned.metrics)
        return EnvironmentResult(
            {self._settings.name: {ENVIRONMENT_REWARD: info["rewards"], ENVIRONMENT_WEIGHTS: info["weights"]}}
        )

    def _failure(self, message: str, code: str, *, retryable: bool = False) -> KestrlError:
        text = f"{FIELD} {self._settings.taskset}: {message}"
        return KestrlError(text, code=code, retryable=retryable, boundary=Boundary.ENVIRONMENT)
