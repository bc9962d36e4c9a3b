"""Tool definitions from type hints and docstrings, and the check of arguments."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import re
import sqlite3
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypedDict

from kestrl.errors import UserInputError
from kestrl.tools import Hidden
from kestrl.tools.arguments import Arguments, ArgumentsInvalid
from kestrl.tools.schema import describe, read


class Folder(enum.Enum):
    INBOX = "inbox"
    SENT = "sent"


class Range(BaseModel):
    """From when to when."""

    title: str
    days: list[int] = []


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Extra(TypedDict, total=False):
    note: str


def search(
    keywords: list[str],
    folder: Folder,
    span: Range | None = None,
    since: datetime.date | None = None,
    limit: Annotated[int, Field(ge=1, le=10, description="At most so many.")] = 10,
    order: Literal["newest", "oldest"] = "newest",
    inbox: Annotated[str, Hidden()] = "",
) -> list[str]:
    """Searches mails.

    All keywords must occur.

    Args:
        keywords: Words to look for;
            case does not matter.
        folder (Folder): Where to look.
        limit: Not this: the hint says it.

    Returns:
        Not for the model.
    """
    return [*keywords, folder.value, str(span), str(since), str(limit), order, inbox]


GOOD: dict[str, Any] = {"keywords": ["contract"], "folder": "inbox"}


def test_the_whole_of_a_function_is_described() -> None:
    schema = describe(search, "search_emails")
    assert schema.name == "search_emails"
    assert schema.description == "Searches mails.\n\nAll keywords must occur."
    assert schema.parameters == {
        "type": "object",
        "properties": {
            "keywords": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Words to look for; case does not matter.",
            },
            "folder": {"$ref": "#/$defs/Folder", "description": "Where to look."},
            "span": {"anyOf": [{"$ref": "#/$defs/Range"}, {"type": "null"}], "default": None},
            "since": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": 10,
                "default": 10,
                "description": "At most so many.",
            },
            "order": {"type": "string", "enum": ["newest", "oldest"], "default": "newest"},
        },
        "required": ["keywords", "folder"],
        "additionalProperties": False,
        "$defs": {
            "Folder": {"type": "string", "enum": ["inbox", "sent"]},
            "Range": {
                "type": "object",
                "description": "From when to when.",
                "properties": {
                    "title": {"type": "string"},
                    "days": {"type": "array", "items": {"type": "integer"}, "default": []},
                },
                "required": ["title"],
            },
        },
    }
    jsonschema.Draft202012Validator.check_schema(schema.parameters)


def test_what_fits_is_converted_to_the_declared_types() -> None:
    arguments = read(search, "search").arguments
    parsed = arguments.parse({**GOOD, "span": {"title": "May"}, "since": "2024-05-01"})
    assert parsed == {
        "keywords": ["contract"],
        "folder": Folder.INBOX,
        "span": Range(title="May"),
        "since": datetime.date(2024, 5, 1),
    }
    assert "hello" not in parsed  # what was not sent is left to the function's own defaults


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"keywords": "contract"}, """argument 'keywords' must be an array, but is the string "contract\""""),
        ({"keywords": [1]}, "argument 'keywords[0]' must be a string, but is the number 1"),
        ({"folder": "trash"}, """argument 'folder' must be one of "inbox", "sent", but is the string "trash\""""),
        ({"limit": 11}, "argument 'limit': 11 is greater than the maximum of 10"),
        ({"limit": "3"}, """argument 'limit' must be an integer, but is the string "3\""""),
        ({"limit": 3.0}, "argument 'limit' must be an integer, but is the number 3.0"),
        ({"limit": True}, "argument 'limit' must be an integer, but is true"),
        ({"span": {"days": []}}, "argument 'span.title' is missing"),
        ({"since": 5}, "argument 'since' must be a string or null, but is the number 5"),
        ({"inbox": "x"}, "argument 'inbox' is unknown (known: keywords, folder, span, since, limit, order)"),
        ({"since": "yesterday"}, "argument 'since' is not accepted (Input should be a valid date"),
    ],
)
def test_what_does_not_fit_is_reported_with_the_fix(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentsInvalid) as caught:
        read(search, "search").arguments.parse({**GOOD, **sent})
    assert str(caught.value).startswith(message)


HUGE = int("9" * 400)


@pytest.mark.parametrize("hint", [float, int, Any, Annotated[float, Field(multiple_of=0.5)], list[float] | None])
@pytest.mark.parametrize("value", [HUGE, -HUGE, float("inf"), float("-inf")], ids=["huge", "-huge", "inf", "-inf"])
def test_a_number_that_no_float_holds_is_out_of_range(hint: Any, value: float) -> None:
    def tool(x: Any) -> None: ...

    tool.__annotations__["x"] = hint
    arguments = read(tool, "tool").arguments
    for sent, place in [(value, "x"), ([1, value], "x[1]"), ({"a": [value]}, "x.a[0]")]:
        with pytest.raises(ArgumentsInvalid, match=re.escape(f"argument '{place}' is a number out of range")):
            arguments.parse({"x": sent})


def test_several_problems_are_reported_at_once_but_not_too_many() -> None:
    with pytest.raises(ArgumentsInvalid) as caught:
        read(search, "search").arguments.parse({"a": 1, "b": 2, "c": 3, "limit": 0})
    assert str(caught.value).count(";") == 2


@pytest.mark.parametrize("sent", [[1], "text", None, 5])
def test_arguments_that_are_not_an_object(sent: object) -> None:
    with pytest.raises(ArgumentsInvalid, match="the arguments must be an object"):
        read(search, "search").arguments.parse(sent)


def test_a_filled_parameter_is_not_asked_of_the_model() -> None:
    arguments = read(search, "search").arguments
    assert arguments.parse({"keywords": ["a"], "folder": 5}, filled=frozenset({"folder"})) == {"keywords": ["a"]}


def test_hidden_and_fixed_parameters() -> None:
    described = read(search, "search", fixed=("limit",))
    assert "limit" not in described.schema.parameters["properties"]
    assert "limit" not in described.fillable
    assert "inbox" in described.fillable

    def needs(path: Annotated[str, Hidden()]) -> str:
        return path

    assert read(needs, "needs").required == {"path"}
    assert describe(needs, "needs").parameters == {"type": "object", "properties": {}, "additionalProperties": False}


class Search:
    """Looks things up."""

    def __init__(self, database: str) -> None:
        self.database = database

    def __call__(self, schema: str, copy: int = 1, point: Point | None = None, extra: Extra | None = None) -> str:
        return f"{schema}{copy}{point}{extra}"


def test_a_class_is_described_by_its_call() -> None:
    described = read(Search, "lookup")
    assert described.schema.description == "Looks things up."
    assert list(described.schema.parameters["properties"]) == ["schema", "copy", "point", "extra"]
    assert described.arguments.parse({"schema": "a", "point": {"x": 1}}) == {"schema": "a", "point": Point(1)}


def test_an_object_a_partial_and_a_decorated_function() -> None:
    @functools.wraps(search)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return search(*args, **kwargs)

    assert describe(decorated, "search") == describe(search, "search")
    fixed = describe(functools.partial(search, folder=Folder.SENT), "search")
    assert fixed.parameters["properties"]["folder"]["default"] == "sent"
    assert describe(Search("x"), "lookup").parameters == describe(Search, "lookup").parameters


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


def test_a_validator_of_the_users_is_reported_too() -> None:
    def halve(number: Annotated[int, AfterValidator(even)]) -> int:
        return number // 2

    halves = read(halve, "halve")
    assert halves.arguments.parse({"number": 4}) == {"number": 4}
    with pytest.raises(ArgumentsInvalid, match=r"argument 'number' is not accepted .*must be even"):
        halves.arguments.parse({"number": 3})


def _untyped(query, limit: int = 3) -> str:
    return f"{query}{limit}"


def _spread(*words: str) -> str:
    return " ".join(words)


def _rest(**options: str) -> str:
    return str(options)


def _opaque(connection: sqlite3.Connection) -> str:
    return str(connection)


def _unknown(value: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(value)


class _Silent:
    pass


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (_untyped, "t: the parameter 'query' has no type hint"),
        (_spread, r"t: the parameter '\*words' cannot be described"),
        (_rest, r"t: the parameter '\*\*options'"),
        (_opaque, "t: the parameter 'connection' has a type without a JSON form"),
        (_unknown, "t: its type hints cannot be read: name 'Nowhere' is not defined"),
        (_Silent, "t: the class _Silent has neither __call__ nor public methods"),
        (5, "t: a tool is a function or a class, this is int"),
    ],
)
def test_what_cannot_be_described_is_reported_with_the_fix(obj: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        describe(obj, "t")


def test_a_default_without_a_json_form_is_left_out() -> None:
    missing = object()

    def tool(value: int = missing) -> int:  # type: ignore[assignment]
        return value

    assert describe(tool, "t").parameters["properties"] == {"value": {"type": "integer"}}


@pytest.mark.parametrize(
    "docstring",
    [
        "Does it.\n\n    Args:\n        a: One\n          two.\n"
        "        b (int): Three: four.\n\n    Raises:\n        x: y",
        "Does it.\n\n    Parameters\n    ----------\n    a : str\n        One\n"
        "        two.\n    b : int\n        Three: four.",
        "Does it.\n\n    :param a: One two.\n    :param int b: Three: four.\n    :returns: x",
    ],
    ids=["Google", "NumPy", "reST"],
)
def test_a_docstring_describes_tool_and_arguments(docstring: str) -> None:
    def tool(a: str, b: int) -> None: ...

    tool.__doc__ = docstring
    schema = describe(tool, "t")
    assert schema.description == "Does it."
    assert schema.parameters["properties"] == {
        "a": {"type": "string", "description": "One two."},
        "b": {"type": "integer", "description": "Three: four."},
    }


@pytest.mark.parametrize(
    "docstring", [None, "Note that this stays.\nSee: also this.", "It does.\n\nArgs:\n    without a colon", "%" * 9]
)
def test_a_docstring_without_sections_is_the_description(docstring: str | None) -> None:
    def tool() -> None: ...

    tool.__doc__ = docstring
    assert describe(tool, "t").description == (docstring or "")


HINTS: dict[str, Any] = {
    "text": str,
    "count": int,
    "share": float,
    "flag": bool,
    "words": list[str],
    "table": dict[str, int],
    "maybe": int | None,
    "either": str | list[int],
    "pick": Literal["a", 1],
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def _tool_of(hints: dict[str, Any]) -> Arguments:
    def tool(**given: Any) -> None: ...

    parameters = ", ".join(f"{name}: 0 = None" for name in hints)
    scope: dict[str, Any] = {}
    exec(f"def tool({parameters}): pass", scope)  # a function with just these parameters
    scope["tool"].__annotations__ = hints
    return read(scope["tool"], "t").arguments


EVERYTHING = _tool_of(HINTS)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(sorted(HINTS)), json_values))
def test_arguments_that_fit_the_schema_are_unchanged_others_refused(sent: dict[str, Any]) -> None:
    strict = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
            "integer", lambda _, value: type(value) is int
        ),
    )
    fits = strict(EVERYTHING.schema).is_valid(sent)
    if fits:
        assert json.loads(json.dumps(EVERYTHING.parse(sent))) == sent
    else:
        with pytest.raises(ArgumentsInvalid, match=r"."):
            EVERYTHING.parse(sent)
