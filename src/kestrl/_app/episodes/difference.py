"""Two episodes side by side, aligned by message, with their first difference marked. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kestrl.episode import Episode
from kestrl.terminal import safe_line

LONGEST = 300
"""Maximum characters of a shown message."""


def best_sibling(episode: Episode, episodes: Sequence[Episode]) -> Episode | None:
    """The other episode of a group with the largest reward; None if none has one."""
    scored = [sibling for sibling in episodes if sibling.id != episode.id and sibling.reward is not None]
    return max(scored, key=lambda sibling: sibling.reward or 0.0, default=None)


def first_difference(one: Episode, other: Episode) -> int | None:
    """Number of the first message in which two episodes differ; None if all are equal."""
    pairs = zip_longest(one.messages, other.messages)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), None)


def difference(one: Episode, other: Episode) -> Iterator[str]:
    """Two episodes as lines of text: facts in two columns, then the messages from their first difference on."""
    facts = [(_facts(one), _facts(other))]
    names = list(dict.fromkeys([*facts[0][0], *facts[0][1]]))
    width = max(12, *(len(facts[0][0].get(name, "-")) for name in names))
    heading = max(map(len, names))
    for name in names:
        left, right = (side.get(name, "-") for side in facts[0])
        yield safe_line(f"{'*' if left != right else ' '} {name:<{heading}} {left:<{width}}  {right}")
    pairs = list(zip_longest(one.messages, other.messages))
    first = first_difference(one, other)
    if first is None:
        yield f"the {len(pairs)} messages are equal"
        return
    yield f"the first {first} messages are equal; the first difference:"
    for number, pair in enumerate(pairs[first:], first):
        for sign, message in zip("<>", pair, strict=True):
            if message is not None:
                yield safe_line(f"{sign} {number:3d} {_message(message)}")


def difference_json(one: Episode, other: Episode) -> dict[str, Any]:
    """Two episodes for programs: facts, whole messages, and the number of the first that differs."""
    sides = [{"facts": _facts(side), "messages": [dict(message) for message in side.messages]} for side in (one, other)]
    return {"episodes": sides, "first_difference": first_difference(one, other)}


def _facts(episode: Episode) -> dict[str, str]:
    failure = episode.failure
    return {
        "episode": episode.id,
        "reward": "-" if episode.reward is None else f"{episode.reward:.3f}",
        **{f"reward {name}": f"{number:.3f}" for name, number in sorted(episode.rewards.items())},
        **{f"metric {name}": f"{number:.3f}" for name, number in sorted(episode.metrics.items())},
        "stop": str(episode.stop_reason),
        "failure": "-" if failure is None else f"{failure.boundary}/{failure.code}",
        "turns": str(episode.num_turns),
        "tool calls": str(len(episode.tool_calls)),
        "sampled tokens": str(episode.sampled_tokens),
    }


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    text += f" {json.dumps(calls, ensure_ascii=False)}" if calls else ""
    excerpt = text if len(text) <= LONGEST else text[:LONGEST] + " ..."
    return f"{message.get('role', '?')}: {excerpt.strip()}"
