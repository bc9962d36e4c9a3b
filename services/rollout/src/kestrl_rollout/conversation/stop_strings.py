"""Stop strings of a client: where its turn ends. Pure.

The engine samples without them, and the turn is cut behind the first token with which its text has a stop string. That
is a stopping time: the tokens up to there, and their log-probs, are those that an engine with the stop string gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kestrl.agents import Completion


def cut_at_stop(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, str]:
    """The completion up to its first stop string, and which that is; empty if it has none."""
    ids = completion.token_ids
    if not stops or _first(decode(ids), stops) == "":
        return completion, ""
    low, high = 1, len(ids)  # the least length whose text has one: once a string is in the text, it stays
    while low < high:
        middle = (low + high) // 2
        if _first(decode(ids[:middle]), stops):
            high = middle
        else:
            low = middle + 1
    stop = _first(decode(ids[:low]), stops)
    beginning = replace(completion, token_ids=ids[:low], logprobs=completion.logprobs[:low], finish_reason="stop")
    return beginning, stop


def _first(text: str, stops: Sequence[str]) -> str:
    """The stop string that begins first, the longest of several; empty if there is none."""
    places = [(place, -len(stop), stop) for stop in stops if stop and (place := text.find(stop)) >= 0]
    return min(places)[2] if places else ""
