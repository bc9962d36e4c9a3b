"""What the responses of an episode said, for clients that send `previous_response_id` and not the history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kestrl_rollout.gateway.chat_types import ChatReply, ChatRequest
from kestrl_rollout.gateway.fields import Refused
from kestrl_rollout.history.canonical import ChatHistory

KEPT = 1024
"""Responses of an episode that can be continued."""


@dataclass(slots=True)
class ResponseStore:
    """The responses of one episode."""

    _histories: OrderedDict[str, Sequence[Mapping[str, Any]]] = field(
        default_factory=OrderedDict[str, Sequence[Mapping[str, Any]]]
    )
    """Messages up to each response, with it; without the instructions, which each request has anew."""

    def resolved(self, request: ChatRequest) -> ChatRequest:
        """A request with the messages that it continues.

        Raises:
            Refused: The response that it names is not of this episode, or too old.
        """
        if not request.previous:
            return request
        previous = self._histories.get(request.previous)
        if previous is None:
            raise Refused(
                f"previous_response_id {request.previous!r} is none of the last {KEPT} responses of this episode; send "
                "the items as input",
                code="previous_response_not_found",
                field="previous_response_id",
            )
        messages = [*request.instructions, *previous, *request.history.messages[len(request.instructions) :]]
        return replace(request, history=ChatHistory(messages=messages, tools=request.history.tools))

    def keep(self, response: str, request: ChatRequest, reply: ChatReply) -> None:
        """Keeps a response to a resolved request, under its id."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        turn = {"role": "assistant", "content": reply.content, "tool_calls": calls}
        self._histories[response] = [*request.history.messages[len(request.instructions) :], turn]
        while len(self._histories) > KEPT:
            self._histories.popitem(last=False)
