"""What a judge sees of a group: the common beginning of its conversations, and the rest of each. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrl.episode import Episode, Group, Json
from kestrl_judge.ruler.escaping import encode

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
OPENED_BY_TEMPLATE = re.compile(r"\A(?:(?!<think>).)*?</think>", re.DOTALL)
"""Reasoning whose opening mark is in the prompt, as in templates that begin the turn with it."""
HIDDEN = "(reasoning of {count} characters hidden by the grading program)"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
Message = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt as a judge sees it; equal attempts of a group share one."""

    episode_ids: tuple[str, ...]
    messages: Sequence[Message]
    """Messages after the common beginning."""
    facts: Mapping[str, Json]
    """Measured by the loop, not claimed by the agent."""

    def content(self) -> dict[str, Json]:
        """The trajectory as JSON."""
        return {"messages": list(self.messages), "facts": dict(self.facts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The different trajectories of a group, ordered by their content, so that a group in another order is equal."""

    context: Sequence[Message]
    tools: Sequence[Mapping[str, Json]]
    trajectories: Sequence[Trajectory]

    def content(self) -> dict[str, Json]:
        """Everything that a score depends on, as JSON."""
        return {
            "context": list(self.context),
            "tools": list(self.tools),
            "trajectories": [trajectory.content() for trajectory in self.trajectories],
        }


def compare(group: Group, *, show_reasoning: bool) -> Comparison:
    """The comparison of the episodes of a group."""
    trajectories = [
        [visible(message, show_reasoning=show_reasoning) for message in member.messages] for member in group.episodes
    ]
    shared = _common(trajectories)
    by_content: dict[str, list[tuple[Episode, list[Message]]]] = {}
    for episode, messages in zip(group.episodes, trajectories, strict=True):
        own_messages: list[Message] = list(messages[shared:])
        content = encode({"messages": own_messages, "facts": facts(episode)})
        by_content.setdefault(content, []).append((episode, own_messages))
    return Comparison(
        context=trajectories[0][:shared],
        tools=group.tools,
        trajectories=[
            Trajectory(
                episode_ids=tuple(episode.id for episode, _ in equal),
                messages=equal[0][1],
                facts=facts(equal[0][0]),
            )
            for _, equal in sorted(by_content.items())
        ],
    )


def facts(episode: Episode) -> dict[str, Json]:
    """Facts about an episode that its text cannot forge."""
    outcomes = Counter(str(call.outcome) for call in episode.tool_calls)
    return {"ended": str(episode.stop_reason), "turns": episode.num_turns, "tool_calls": dict(sorted(outcomes.items()))}


def visible(message: Message, *, show_reasoning: bool) -> dict[str, Any]:
    """A message as a judge sees it."""
    visible_message = dict(message)
    if show_reasoning or visible_message.get("role") != "assistant":
        return visible_message
    for field in REASONING_FIELDS:
        if visible_message.get(field):
            visible_message[field] = HIDDEN.format(count=len(str(visible_message[field])))
    if isinstance(visible_message.get("content"), str):
        visible_message["content"] = without_reasoning(visible_message["content"])
    return visible_message


def without_reasoning(text: str) -> str:
    """A turn without what it says between think marks."""

    def hide(match: re.Match[str]) -> str:
        return HIDDEN.format(count=len(match[0]))

    return THINKING.sub(hide, OPENED_BY_TEMPLATE.sub(hide, text, count=1))


def _common(conversations: Sequence[Sequence[Message]]) -> int:
    """Number of equal messages at the beginning of all conversations."""
    length = min(map(len, conversations), default=0)
    first: Sequence[Message] = conversations[0] if conversations else ()
    for position in range(length):
        if any(conversation[position] != first[position] for conversation in conversations):
            return position
    return length
