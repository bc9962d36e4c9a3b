"""The agent loop that has an episode run by an agent outside of the worker, over the conversation that it samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrl.agents import Conversation
from kestrl.agents.runs import row_of
from kestrl.episode import PROMPT_TOO_LONG, StopReason
from kestrl.errors import UserCodeError, UserInputError
from kestrl_rollout.gateway.sampler import REFUSED
from kestrl_rollout.hosts.host import Host, RunEnded, RunRequest
from kestrl_rollout.hosts.stops import Stop, Stops

TOO_LONG = "context_length_exceeded"
"""Code of a request whose prompt is too long, which a client may shorten."""
STOPPED_BY = "stopped_by."
"""Beginning of the metric that names what stopped a run."""


class HostLoop:
    """Runs episodes by a host."""

    def __init__(
        self, host: Host, *, config: Mapping[str, Any], stops: Stops, stopped_reward: float | None = None
    ) -> None:
        """Uses a host.

        Args:
            host: The agent.
            config: What each run gets of the manifest.
            stops: Ends that are scored.
            stopped_reward: What a run that ends so returns as its reward.
        """
        self._host, self._config = host, config
        self._stops, self._stopped_reward = stops, stopped_reward

    async def run(self, conversation: Conversation) -> object:
        """Runs an episode; returns its reward, if there is one."""
        async with conversation.serve() as endpoint:
            request = RunRequest(
                row=row_of(conversation.scenario),
                base_url=endpoint.base_url,
                key=endpoint.api_key,
                mcp_url=endpoint.mcp_url,
                deadline=conversation.deadline,
                config=self._config,
            )
            try:
                returned = await self._host.run(request)
            except RunEnded as end:
                return self._stopped(conversation, end)
        if not _sampled(conversation):
            raise UserCodeError(
                f"{self._host.field} {self._host.name}: ended without a call that was answered; have its client use "
                "the base URL and the key of the episode",
                code="agent_made_no_call",
            )
        conversation.metrics.update(returned.metrics)
        conversation.info.update(returned.info)
        return returned.reward

    def _stopped(self, conversation: Conversation, end: RunEnded) -> float | None:
        """Scores a run that a limit or a mistake of the model ended.

        Raises:
            UserCodeError: It is a failure of the agent.
            UserInputError: The context has no room for the agent's first prompt (code `prompt_too_long`).
        """
        stop = self._stop(conversation, end)
        if not _sampled(conversation):
            if stop is not None and stop.name == TOO_LONG:
                raise UserInputError(
                    f"scenario {conversation.scenario.id}: the first prompt of {self._host.field} {self._host.name} "
                    f"leaves no room in {conversation.limits.context_length} tokens; shorten it or raise "
                    "inference.contextLength",
                    code=PROMPT_TOO_LONG,
                )
            stop = None  # no mistake of the model
        if stop is None:
            raise UserCodeError(str(end), code=end.code, retryable=end.retryable) from end
        conversation.stop(stop.reason)
        conversation.metrics[f"{STOPPED_BY}{stop.name}"] = 1.0
        return self._stopped_reward

    def _stop(self, conversation: Conversation, end: RunEnded) -> Stop | None:
        """The stop that an end is, if it is one: by its names, or as a call was refused at a limit of the episode."""
        if (stop := self._stops.of(end.names)) is not None:
            return stop
        if conversation.limit is not None:
            return Stop(conversation.limit, conversation.limit)
        return Stop(StopReason.MAX_TOKENS, TOO_LONG) if f"{REFUSED}{TOO_LONG}" in conversation.metrics else None


def _sampled(conversation: Conversation) -> bool:
    return len(conversation.messages) > len(conversation.scenario.messages)
