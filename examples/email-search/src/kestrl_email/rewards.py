"""The ART-E e-mail reward (OpenPipe/ART, examples/art-e) with fixes of defects of its published form.

| case (first that holds)                    | value                                                                  |
range          |
|--------------------------------------------|------------------------------------------------------------------------|----------------|
| no answer, the last call was unreadable    | -2 + partial                                                           |
-2 .. -1.7     |
| no answer, the last call: unknown tool     | -1.9 + partial                                                         |
-1.9 .. -1.6   |
| no answer, the last call: wrong arguments  | -1.8 + partial                                                         |
-1.8 .. -1.5   |
| answered, and wrong                        | -1 + partial                                                           |
-1 .. -0.6     |
| "I don't know", or stopped without answer  | 0 + partial                                                            |
0 .. 0.4       |
| answered right                             | 1 + 0.3 [right source] + 0.1 / sources + 0.1 (1 - turns / max_turns)   |
1 .. 1.49      |

partial = 0.1 [ever found] + 0.1 [ever read] + 0.1 [read something, and never an invalid id] + 0.1 [right source].
The four kinds never overlap (malformed < wrong < no answer < right); the three malformed ones do, as published.

Fixes:

* Sources are counted (art-e never set their number); an id given twice counts once.
* An invalid id only costs its tenth if something was read, so that giving up immediately earns nothing.
* Failures of the infrastructure are never scored: such an episode has no reward. In rl-qwen3 a time-out of the engine
  was scored as a malformed call.
* A malformed call does not end the episode: the model gets a message and may correct the call. Only the end of the
  episode counts.
* The answer is compared, not judged by a model. It must be equal except for case, white space and a final full stop, so
  a list of guesses earns nothing.
* `answer_correct` requires the right answer *with the right mail cited*; the published metric, without it, is
  `answer_right`.
"""

from __future__ import annotations

from kestrl.episode import CallOutcome, Episode, StopReason, ToolCall
from kestrl.rewards import Attempt, Score
from kestrl_email.tools import DONT_KNOW

UNREADABLE = (CallOutcome.INVALID_JSON, CallOutcome.TRUNCATED)


def normalised(text: str) -> str:
    """Text without differences in case, white space and a final full stop."""
    return " ".join(text.casefold().split()).rstrip(".")


def _final_call(episode: Episode) -> ToolCall | None:
    for call in reversed(episode.tool_calls):
        if call.outcome is CallOutcome.OK and "answer" in call.data:
            return call
    return None


def _broken_tier(episode: Episode) -> float | None:
    """Tier of an episode whose last call was not executed; None for others."""
    if not episode.tool_calls:
        return None
    outcome = episode.tool_calls[-1].outcome
    if outcome in UNREADABLE:
        return -2.0
    if outcome is CallOutcome.UNKNOWN_TOOL:
        return -1.9
    if outcome is CallOutcome.SCHEMA_VIOLATION:
        return -1.8
    return None


def art_e(attempt: Attempt) -> Score:
    """Scores one episode; the ground truth is `{"answer": text, "message_id": id}`."""
    episode = attempt.episode
    ground_truth = attempt.scenario.ground_truth
    expected, right_id = normalised(ground_truth["answer"]), ground_truth["message_id"]
    done = [call for call in episode.tool_calls if call.outcome is CallOutcome.OK]
    found = any(right_id in call.data.get("found", ()) for call in done)
    reads = [call for call in episode.tool_calls if call.name == "read_email"]
    read = any(call.data.get("read") == right_id for call in done)
    invalid = any(call.outcome is CallOutcome.TOOL_ERROR for call in reads)
    final = _final_call(episode)
    answer = "" if final is None else str(final.data["answer"])
    sources: list[str] = [] if final is None else list(dict.fromkeys(final.data["sources"]))
    unknown = final is not None and normalised(answer) == normalised(DONT_KNOW)
    attempted = final is not None and not unknown
    answer_right = attempted and normalised(answer) == expected
    sources_right = right_id in sources
    partial = 0.1 * found + 0.1 * read + 0.1 * (bool(reads) and not invalid) + 0.1 * sources_right
    broken = None if final is not None else _broken_tier(episode)
    if broken is not None:
        value = broken + partial
    elif not attempted:
        value = partial
    elif not answer_right:
        value = -1.0 + partial
    else:
        brevity = 0.1 * (1 - episode.num_turns / attempt.max_turns)
        value = 1.0 + 0.3 * sources_right + (0.1 / len(sources) if sources else 0.0) + brevity
    return Score(
        value=value,
        metrics={
            "answer_correct": float(answer_right and sources_right),
            "answer_right": float(answer_right),
            "sources_correct": float(sources_right),
            "ever_found_right_email": float(found),
            "ever_read_right_email": float(read),
            "attempted_answer": float(attempted),
            "returned_i_dont_know": float(unknown),
            "ran_out_of_turns": float(episode.stop_reason is StopReason.MAX_TURNS),
            "num_sources": float(len(sources)),
        },
    )


def first_search(attempt: Attempt) -> Score:
    """Scores one search; the ground truth is `{"message_id": id, "named": [person, topic]}`.

    | case                           | value                                                                   | range
    |
    |--------------------------------|-------------------------------------------------------------------------|----------|
    | no search could be carried out | -1                                                                      | -1
    |
    | searched                       | 0.4 for each of both that is a keyword + 0.2 [found the right mail alone] | 0 ..
    1 |

    A search for both finds one mail, unless a further keyword spoils it; a search for one of them finds others too.
    """
    ground_truth = attempt.scenario.ground_truth
    searches = [call for call in attempt.episode.tool_calls if call.outcome is CallOutcome.OK and "found" in call.data]
    if not searches:
        return Score(value=-1.0, metrics={"searched": 0.0, "found_right_email": 0.0, "found_it_alone": 0.0})
    first = searches[0]
    found: list[str] = first.data["found"]
    keywords = {normalised(str(keyword)) for keyword in (first.arguments or {}).get("keywords", ())}
    named = sum(normalised(name) in keywords for name in ground_truth["named"])
    alone = found == [ground_truth["message_id"]]
    return Score(
        value=0.4 * named + 0.2 * alone,
        metrics={
            "searched": 1.0,
            "found_right_email": float(ground_truth["message_id"] in found),
            "found_it_alone": float(alone),
        },
    )
