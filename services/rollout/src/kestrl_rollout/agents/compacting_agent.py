"""The tool-using agent for tasks longer than its context: it has the policy summarise, and goes on from the summary."""

from __future__ import annotations

from kestrl.agents import Conversation

REQUEST = (
    "The conversation has become too long and will be replaced by a summary. Write it now, without calling tools: what "
    "was asked, what you did and found, with all names, numbers and ids that you still need, and what is left to do."
)
SUMMARY = "What you did so far, in your own summary:\n{summary}\n\nGo on from there."
COMPACTIONS = "compactions"
"""Metric: number of summaries."""


class CompactingAgent:
    """Calls tools until it answers without one, as `tool_agent` does, and compacts at a budget of tokens.

    A summary is a turn like any other: sampled from the policy, at the end of the row that it summarises, and trained.
    """

    def __init__(self, at: int | None = None, request: str = REQUEST) -> None:
        """Configures it.

        Args:
            at: Tokens of the next prompt from which on the conversation is compacted first. Default: half of the
                context.
            request: The message that asks for a summary.

        Raises:
            ValueError: An argument is not one of these.
        """
        if at is not None and (type(at) is not int or at < 1):
            raise ValueError(f"at is a number of tokens, at least 1, not {at!r}")
        if not isinstance(request, str) or not request.strip():  # pyright: ignore[reportUnnecessaryIsInstance] - a manifest's
            raise ValueError("request is a text that asks for a summary")
        self._at, self._request = at, request

    async def run(self, conversation: Conversation) -> None:
        """Runs an episode."""
        at = self._at or conversation.limits.context_length // 2
        while reply := await conversation.generate():
            if reply.calls:
                await conversation.call_tools(reply.calls)
            elif not await conversation.act(reply.content):
                return
            if conversation.limit is not None or conversation.prompt_tokens < at:
                continue
            conversation.append_user(self._request)
            summary = await conversation.generate()
            if summary is None:
                return
            conversation.compact(SUMMARY.format(summary=summary.content.strip()))
            conversation.metrics[COMPACTIONS] = conversation.metrics.get(COMPACTIONS, 0) + 1
