"""The reply of a judge model: its schema, and its check. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from kestrl.errors import encodable, shown

LONGEST_REPLY = 1_000_000
"""Characters of a reply that are read."""
LONGEST_EXPLANATION = 4000
SHORTEST_EXPLANATION, LONGEST_ENFORCED = 40, 400
"""Bounds of the length of an explanation in characters where the server enforces the schema."""
ITEM_TOKENS = 90
"""Upper estimate of the tokens of one item without its explanation."""
SCORE_STEPS = 20
"""Steps from 0 to 1 of a score where the server enforces the schema."""
FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(?P<body>.*)\n\s*```\s*\Z", re.DOTALL)


class Malformed(Exception):
    """The reply does not fit the schema; the text describes why, for the judge's second attempt."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Score of one trajectory."""

    score: float
    explanation: str


def schema(ids: Sequence[str], *, strict_tokens: int | None) -> dict[str, Any]:
    """JSON schema of a reply.

    Args:
        ids: Trajectory ids in the order shown.
        strict_tokens: Where the server enforces every keyword: tokens of a reply, within which even a small model then
            names each id once and ends. None for hosted models, which accept a subset of keywords only.
    """
    if strict_tokens is None:
        item = _item({"type": "string", "enum": list(ids)}, {"type": "string"}, {"type": "number"})
        return object_schema({"scores": {"type": "array", "items": item}})
    characters = max(SHORTEST_EXPLANATION, min(LONGEST_ENFORCED, strict_tokens // len(ids) - ITEM_TOKENS))
    # A pattern and not a length: other characters take several tokens each, and the reply would not end in time.
    explanation = {"type": "string", "pattern": rf"^[ !#-\[\]-~]{{1,{characters}}}$"}
    score = {"enum": [step / SCORE_STEPS for step in range(SCORE_STEPS + 1)]}
    items = [_item({"const": trajectory_id}, explanation, score) for trajectory_id in ids]
    exact = {"type": "array", "prefixItems": items, "items": False, "minItems": len(ids), "maxItems": len(ids)}
    return object_schema({"scores": exact})


class ReplyForm(Protocol):
    """The form of a reply to one prompt."""

    def schema(self, *, strict_tokens: int | None) -> dict[str, Any]:
        """JSON schema; `strict_tokens` as in `schema`."""
        ...

    def parse(self, text: str) -> dict[str, Grade]:
        """The grades by id; raises Malformed."""
        ...

    @property
    def wanted(self) -> str:
        """What a valid reply holds, for a repair."""
        ...


@dataclass(frozen=True, slots=True)
class ScoresForm:
    """A score for each of several trajectories."""

    ids: Sequence[str]

    def schema(self, *, strict_tokens: int | None) -> dict[str, Any]:
        return schema(self.ids, strict_tokens=strict_tokens)

    def parse(self, text: str) -> dict[str, Grade]:
        return parse(text, self.ids)

    @property
    def wanted(self) -> str:
        return f"each of these ids exactly once and a score between 0 and 1 for each: {', '.join(self.ids)}"


def _item(name: Mapping[str, Any], explanation: Mapping[str, Any], score: Mapping[str, Any]) -> dict[str, Any]:
    return object_schema({"trajectory_id": name, "explanation": explanation, "score": score})


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def parse(text: str, ids: Sequence[str]) -> dict[str, Grade]:
    """The grades by trajectory id.

    Raises:
        Malformed: The reply is not one JSON object with a score for every id exactly once.
    """
    scores: Any = field_of(read_object(text), "scores", "the reply")
    if not isinstance(scores, list):
        raise Malformed('"scores" is not a list')
    grades: dict[str, Grade] = {}
    for position, entry in enumerate(cast(Any, scores)):
        where = f"scores[{position}]"
        name = field_of(entry, "trajectory_id", where)
        if not isinstance(name, str) or name not in ids:
            raise Malformed(f"{where}: trajectory_id {shown(name)} is not one of the ids")
        if name in grades:
            raise Malformed(f"{where}: {name} is scored twice")
        grades[name] = Grade(_score(entry, where), explanation_of(entry, where))
    unscored = [name for name in ids if name not in grades]
    if unscored:
        raise Malformed(f"no score for {', '.join(unscored)}")
    return grades


def read_object(text: str) -> Any:
    """The JSON of a reply, which may stand in a block of Markdown.

    Raises:
        Malformed: It is empty, too long, or not strict JSON.
    """
    if not text.strip():
        raise Malformed("the reply is empty")
    if len(text) > LONGEST_REPLY:
        raise Malformed(f"the reply has {len(text)} characters, more than {LONGEST_REPLY}")
    fenced = FENCE.match(text)
    try:
        return json.loads(
            fenced["body"] if fenced else text, parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the reply is not a JSON object: {error}"[:300]) from None


def field_of(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise Malformed(f'{where} has no "{name}"')
    return cast(Any, value[name])


def _score(entry: Any, where: str) -> float:
    score = field_of(entry, "score", where)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise Malformed(f"{where}: the score is not a number")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if not 0.0 <= number <= 1.0:
        raise Malformed(f"{where}: the score {number} is not between 0 and 1")
    return number


def explanation_of(entry: Any, where: str) -> str:
    explanation = field_of(entry, "explanation", where)
    if not isinstance(explanation, str):
        raise Malformed(f"{where}: the explanation is not text")
    return encodable(explanation[:LONGEST_EXPLANATION])  # JSON may escape half of a cut emoji


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return mapping
