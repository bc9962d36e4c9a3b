"""Rewards of e-mail search: `art_e` (ART-E's, with its defects fixed), `art_e_compat` (as published), `evidence_gated`.

`art_e` is the first case that holds:

| case                                       | value                                                                |
range        |
|--------------------------------------------|----------------------------------------------------------------------|--------------|
| no answer, the last call was unreadable    | -2 + partial                                                         | -2
.. -1.7   |
| no answer, the last call: unknown tool     | -1.9 + partial                                                       |
-1.9 .. -1.6 |
| no answer, the last call: wrong arguments  | -1.8 + partial                                                       |
-1.8 .. -1.5 |
| answered, and wrong                        | -1 + partial                                                         | -1
.. -0.6   |
| "I don't know", or stopped without answer  | 0 + partial                                                          | 0
.. 0.4     |
| answered right                             | 1 + 0.3 [right source] + 0.1 / sources + 0.1 (1 - turns / max_turns) | 1
.. 1.49    |

partial = 0.1 [ever found] + 0.1 [ever read] + 0.1 [read something, and never an invalid id] + 0.1 [right source].
The four kinds never overlap (malformed < wrong < no answer < right); the three malformed ones do, as published.

Fixes:

* Sources are counted (art-e never set their number); an id given twice counts once.
* An invalid id only costs its tenth if something was read, so that giving up immediately earns nothing.
* Failures of the infrastructure are never scored: such an episode has no reward. In rl-qwen3 a time-out of the engine
  was scored as a malformed call.
* A malformed call does not end the episode: the model gets a message and may correct the call. Only the end of the
  episode counts.
* The answer must be equal to an accepted answer except for case, white space and a final full stop, so a list of
  guesses earns nothing. If the manifest names a judge model (`rewards[].correctness`), it decides on every other
  answer; an answer that it does not judge leaves the episode without a reward.
* `answer_correct` requires the right answer *with the right mail cited*; the published metric, without it, is
  `answer_right`.

The ground truth of a row is `{"answer": text, "message_id": id}`; for real mail also `aliases`, further accepted
answers, and in place of `message_id` the list `message_ids` with `evidence`: `any` of them is enough, or `all` are
needed. A row may name a mail by the id of any of its copies, which the database has folded into one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrl.episode import CallOutcome, Episode, StopReason, ToolCall
from kestrl.rewards import Attempt, Score
from kestrl.tools.shapes import is_mapping
from kestrl_email.tools import DONT_KNOW

UNREADABLE = (CallOutcome.INVALID_JSON, CallOutcome.TRUNCATED)
MALFORMED = {
    CallOutcome.INVALID_JSON: -2.0,
    CallOutcome.TRUNCATED: -2.0,
    CallOutcome.UNKNOWN_TOOL: -1.9,
    CallOutcome.SCHEMA_VIOLATION: -1.8,
}
"""Value of an episode that ends with such a call."""
MAX_SOURCES = 3
"""Sources that `evidence_gated` accepts at most, unless more are needed: citing everything is not evidence."""


def normalised(text: str) -> str:
    """Text without differences in case, Unicode form, white space and a final full stop."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Mails that hold the answer."""

    message_ids: tuple[str, ...]
    all_needed: bool

    @staticmethod
    def of(ground_truth: object) -> Evidence:
        """The evidence of a row.

        Raises:
            TypeError: It is not an object.
            ValueError: `evidence` is neither any nor all, or no mail is named.
        """
        if not is_mapping(ground_truth):
            raise TypeError("ground_truth: must be an object with answer and message_id")
        needed = ground_truth.get("evidence", "any")
        ids = tuple(ground_truth["message_ids"]) if "message_ids" in ground_truth else (ground_truth["message_id"],)
        if needed not in {"any", "all"} or not ids:
            raise ValueError(
                f"ground_truth: evidence is {needed!r} with {len(ids)} message_ids; use any or all, and ids"
            )
        return Evidence(message_ids=ids, all_needed=needed == "all")

    def named(self, copies: Mapping[str, str]) -> Evidence:
        """The evidence, with each mail under the name that the tools use.

        Args:
            copies: Ids of folded copies, each with the name of its mail.
        """
        return replace(self, message_ids=tuple(dict.fromkeys(copies.get(each, each) for each in self.message_ids)))

    def within(self, ids: Sequence[str]) -> bool:
        """Whether these ids include what is needed."""
        combined = all if self.all_needed else any
        return combined(message_id in ids for message_id in self.message_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an episode did, as far as its calls show."""

    found: bool
    read: bool
    tried_to_read: bool
    read_invalid: bool
    answered: bool
    unknown: bool
    """Answered "I don't know"."""
    answer_right: bool
    """Equal to an accepted answer, or found correct by the job's judge model."""
    sources_right: bool
    sources: int
    """Distinct cited mails."""

    @property
    def attempted(self) -> bool:
        return self.answered and not self.unknown


def facts_of(attempt: Attempt, calls: Sequence[ToolCall], ground_truth: Mapping[str, Any]) -> Facts:
    """The facts of tool calls, in order."""
    successes = [call for call in calls if call.outcome is CallOutcome.OK]
    evidence = Evidence.of(ground_truth).named(_copies(successes))
    reads = [call for call in calls if call.name == "read_email"]
    final = next((call for call in reversed(successes) if "answer" in call.data), None)
    text = "" if final is None else str(final.data["answer"])
    answer = normalised(text)
    sources: list[str] = [] if final is None else list(dict.fromkeys(final.data["sources"]))
    unknown = final is not None and answer == normalised(DONT_KNOW)
    accepted = [str(each) for each in (ground_truth["answer"], *ground_truth.get("aliases", ()))]
    return Facts(
        found=evidence.within([message_id for call in successes for message_id in call.data.get("found", ())]),
        read=evidence.within([str(call.data.get("read")) for call in successes]),
        tried_to_read=bool(reads),
        read_invalid=any(call.outcome is CallOutcome.TOOL_ERROR for call in reads),
        answered=final is not None,
        unknown=unknown,
        answer_right=final is not None and not unknown and _is_right(attempt, text, accepted),
        sources_right=evidence.within(sources),
        sources=len(sources),
    )


def _copies(calls: Sequence[ToolCall]) -> dict[str, str]:
    """Ids of the folded copies of the mails that an episode met, with the names of their mails."""
    return {copy: name for call in calls for copy, name in call.data.get("copies", {}).items()}


def _is_right(attempt: Attempt, answer: str, accepted: Sequence[str]) -> bool:
    if normalised(answer) in map(normalised, accepted):
        return True
    question = next((it["content"] for it in reversed(attempt.scenario.messages) if it["role"] == "user"), "")
    return bool(attempt.judged_correct(question=question, accepted=accepted, answer=answer))


def _metrics(episode: Episode, facts: Facts) -> dict[str, float]:
    outcomes = [call.outcome for call in episode.tool_calls]
    # Episodes of a model behind an endpoint have no tokens; their usage is a metric already.
    tokens = {
        "completion_tokens": float(episode.sampled_tokens),
        "total_tokens": float(sum(len(row.token_ids) for row in episode.rows)),
    }
    return {
        "answer_correct": float(facts.answer_right and facts.sources_right),
        "answer_right": float(facts.answer_right),
        "sources_correct": float(facts.sources_right),
        "ever_found_right_email": float(facts.found),
        "ever_read_right_email": float(facts.read),
        "attempted_answer": float(facts.attempted),
        "returned_i_dont_know": float(facts.unknown),
        "ran_out_of_turns": float(episode.stop_reason is StopReason.MAX_TURNS),
        "num_sources": float(facts.sources),
        "cant_parse_tool_call": float(any(outcome in UNREADABLE for outcome in outcomes)),
        "bad_tool_call_name": float(CallOutcome.UNKNOWN_TOOL in outcomes),
        "bad_tool_call_args": float(CallOutcome.SCHEMA_VIOLATION in outcomes),
        "tool_errors": float(sum(outcome is CallOutcome.TOOL_ERROR for outcome in outcomes)),
        **(tokens if episode.rows else {}),
    }


def art_e(attempt: Attempt) -> Score:
    """Scores one episode by the table of this module."""
    episode = attempt.episode
    facts = facts_of(attempt, episode.tool_calls, attempt.scenario.ground_truth)
    never_invalid = facts.tried_to_read and not facts.read_invalid
    partial = 0.1 * facts.found + 0.1 * facts.read + 0.1 * never_invalid + 0.1 * facts.sources_right
    last = episode.tool_calls[-1].outcome if episode.tool_calls else None
    if last is not None and not facts.answered and last in MALFORMED:
        value = MALFORMED[last] + partial
    elif not facts.attempted:
        value = partial
    elif not facts.answer_right:
        value = -1.0 + partial
    else:
        value = _right(attempt, facts, episode.num_turns)
    return Score(value=value, metrics=_metrics(episode, facts))


def _right(attempt: Attempt, facts: Facts, turns: int) -> float:
    cited = 0.1 / facts.sources if facts.sources else 0.0
    return 1.0 + 0.3 * facts.sources_right + cited + 0.1 * (1 - turns / attempt.max_turns)


def art_e_compat(attempt: Attempt) -> Score:
    """The reward of rl-qwen3 and ART-E as published, for comparisons with their figures.

    Differences to `art_e`: a malformed call decides the value even if the model corrects it afterwards (there the
    episode ended with it), an episode that ends in a turn without any call counts as wrong arguments, a tenth is given
    for never reading an invalid id even where nothing was read, and one of several evidence mails is enough. A failure
    of the infrastructure is not scored here either.
    """
    episode = attempt.episode
    ground_truth = {**attempt.scenario.ground_truth, "evidence": "any"}
    calls = episode.tool_calls
    first = next((index for index, call in enumerate(calls) if call.outcome in MALFORMED), None)
    facts = facts_of(attempt, calls if first is None else calls[:first], ground_truth)
    partial = 0.1 * facts.found + 0.1 * facts.read + 0.1 * (not facts.read_invalid) + 0.1 * facts.sources_right
    if first is not None:
        value = MALFORMED[calls[first].outcome] + partial
    elif episode.stop_reason is StopReason.ANSWERED and not facts.answered:
        value = MALFORMED[CallOutcome.SCHEMA_VIOLATION] + partial
    elif facts.attempted and not facts.answer_right:
        value = -1.0 + partial
    elif not facts.attempted:
        value = partial
    else:
        value = _right(attempt, facts, episode.num_turns)
    return Score(value=value, metrics=_metrics(episode, facts_of(attempt, calls, attempt.scenario.ground_truth)))


def evidence_gated(attempt: Attempt, max_sources: int = MAX_SOURCES) -> Score:
    """1 for a right answer with accepted sources, else 0: neither a lucky guess nor citing everything earns anything.

    Args:
        attempt: The episode.
        max_sources: Cited mails that are accepted at most, or as many as are needed.
    """
    ground_truth = attempt.scenario.ground_truth
    facts = facts_of(attempt, attempt.episode.tool_calls, ground_truth)
    evidence = Evidence.of(ground_truth)
    allowed = max(max_sources, len(evidence.message_ids) if evidence.all_needed else 1)
    accepted = facts.answer_right and facts.sources_right and facts.sources <= allowed
    return Score(value=float(accepted), metrics=_metrics(attempt.episode, facts))


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
