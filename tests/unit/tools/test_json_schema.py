"""The boundary of JSON Schema: nothing is retrieved, and no schema or value takes more work than its bound."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from kestrl.formats import Marker
from kestrl.formats.tagged import QwenXml
from kestrl.tools.arguments import Arguments, ArgumentsInvalid
from kestrl.tools.json_schema import JsonSchema, SchemaInvalid, TooCostly
from kestrl.tools.references import properties_of

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
QUICK_SECONDS = 5.0
"""Far below what each of these took without a bound, and far above what they take on a loaded machine."""


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def doubled(levels: int) -> dict[str, Any]:
    """Definitions of which each applies the one before twice."""
    defs: dict[str, Any] = {"a0": {"type": "string"}}
    for level in range(1, levels):
        defs[f"a{level}"] = {"allOf": [{"$ref": f"#/$defs/a{level - 1}"}] * 2}
    return {**of(x={"$ref": f"#/$defs/a{levels - 1}"}), "$defs": defs}


def chain(length: int) -> dict[str, Any]:
    links = {f"c{link}": {"$ref": f"#/$defs/c{link + 1}"} for link in reversed(range(length))}
    return {**of(x={"$ref": "#/$defs/c0"}), "$defs": {f"c{length}": {}, **links}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return of(x=schema)


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "of http": (of(x={"$ref": "http://127.0.0.1:1/secret"}), "not into the document"),
    "of a file": (of(x={"$ref": "file:///etc/passwd"}), "not into the document"),
    "of another document": (of(x={"$ref": "other.json#/a"}), "not into the document"),
    "nowhere": (of(x={"$ref": "#/definitions/Missing"}), "names nothing"),
    "nowhere, in what nothing names": ({**of(), "$defs": {"a": {"$ref": "#/b"}}}, "names nothing"),
    "to itself": (of(x={"$ref": "#/properties/x"}), "leads to itself"),
    "to the whole from the whole": ({"allOf": [{"$ref": "#"}]}, "leads to itself"),
    "in a circle": ({**of(), "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}}, "to itself"),
    "a bomb": (doubled(40), "more than 5000 parts"),
    "a chain": (chain(1000), "more than 64 parts"),
    "too deep": (nested(90), "more than 64 parts"),
    "far too deep": (nested(50_000), "nested more than 200 levels"),
    "too wide": (of(**{f"p{number}": {} for number in range(6000)}), "more than 5000 parts"),
    "of another base": (of(x={"$id": "http://a.example/b", "$ref": "#/c"}), r"\$id"),
    "dynamic": (of(x={"$dynamicRef": "#a"}), r"\$dynamicRef"),
    "of an unknown dialect": ({"$schema": "http://127.0.0.1:1/meta", **of()}, "dialect"),
    "of a dialect that is no text": ({"$schema": ["a"], **of()}, "dialect"),
    "no regular expression": (of(x={"pattern": "("}), "not a regular expression"),
    "a pattern that is too large": (of(x={"pattern": "(a{1000}){1000}"}), "too large"),
    "look-around in names": (of(x={"patternProperties": {"^(?=a)": {}}}), "look-around"),
    "a surrogate": (of(x={"pattern": "\ud800"}), "lone surrogate"),
    "no number of JSON": (of(x={"minimum": float("nan")}), "nan"),
    "no schema": (of(x=5), "neither an object"),
    "no type": (of(x={"type": "objekt"}), "objekt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_checked_within_bounds_is_refused_at_once(name: str) -> None:
    schema, reason = REFUSED[name]
    began = time.process_time()
    with pytest.raises(SchemaInvalid, match=reason):
        JsonSchema(schema)
    assert time.process_time() - began < QUICK_SECONDS


def test_a_cyclic_value_is_no_schema() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["not"] = cyclic
    with pytest.raises(SchemaInvalid, match="nested more than"):
        JsonSchema(cyclic)


@pytest.mark.parametrize("value", [19.99, 0.07, 4.35, 0.1 + 0.2 - 0.3 + 1.1])
def test_decimals_are_multiples(value: float) -> None:
    assert JsonSchema(of(x={"multipleOf": 0.01})).is_valid({"x": round(value, 2)})
    assert not JsonSchema(of(x={"multipleOf": 0.01})).is_valid({"x": 1.005})


def test_the_dialect_is_that_of_the_schema() -> None:
    pair = of(x={"type": "array", "items": [{"type": "number"}, {"type": "string"}]})
    assert JsonSchema({"$schema": DRAFT_7, **pair}).is_valid({"x": [1, "a"]})
    assert not JsonSchema(pair, DRAFT_7).is_valid({"x": ["a", 1]})
    with pytest.raises(SchemaInvalid):
        JsonSchema(pair)


def test_a_pattern_takes_time_linear_in_the_text() -> None:
    began = time.process_time()
    arguments = Arguments(of(x={"type": "string", "pattern": "^(a+)+$"}))
    with pytest.raises(ArgumentsInvalid):
        arguments.parse({"x": "a" * 100_000 + "!"})
    wide = Arguments(of(x={"type": "string", "pattern": "[01]*1[01]{500}x"}))
    with pytest.raises(ArgumentsInvalid, match="too large"):
        wide.parse({"x": "01" * 200_000})
    assert time.process_time() - began < QUICK_SECONDS


def test_a_pattern_with_look_around_is_checked_on_short_texts() -> None:
    arguments = Arguments(of(x={"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}))
    assert arguments.parse({"x": "12.5"}) == {"x": "12.5"}
    for text in ("a", "1" * 5000):
        with pytest.raises(ArgumentsInvalid, match="argument 'x'"):
            arguments.parse({"x": text})


def test_a_recursive_schema_checks_what_is_in_its_budget_and_refuses_the_rest() -> None:
    tree = {**of(left={"$ref": "#"}, right={"$ref": "#"}), "additionalProperties": False}
    value: dict[str, Any] = {}
    for _ in range(60):
        value = {"left": value, "right": {}}
    assert Arguments(tree).parse(value) == value
    both = of(c={"type": "object", "anyOf": [{"$ref": "#"}, {"$ref": "#"}]})
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"c": deep}
    began = time.process_time()
    with pytest.raises(TooCostly):
        JsonSchema(both).is_valid(deep)
    with pytest.raises(ArgumentsInvalid, match="nested too deeply"):
        Arguments(both).parse(deep)
    assert time.process_time() - began < QUICK_SECONDS


def test_an_enumeration_of_objects_has_its_price() -> None:
    schema = JsonSchema(of(x={"type": "array", "items": {"enum": [{"v": number} for number in range(3000)]}}))
    assert schema.is_valid({"x": [{"v": 2999}]})
    with pytest.raises(TooCostly):
        schema.is_valid({"x": [{"v": 2999}] * 10_000})


def test_a_long_list_with_many_problems_is_refused_with_the_first() -> None:
    began = time.process_time()
    with pytest.raises(ArgumentsInvalid, match=r"argument 'x\[0\]' must be a string, but is the number 0"):
        Arguments(of(x={"type": "array", "items": {"type": "string"}})).parse({"x": list(range(50_000))})
    assert time.process_time() - began < QUICK_SECONDS


def deep_value(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        deep_value(500),
        deep_value(100_000),
        "\ud800",
        {"\ud800": 1},
        float("nan"),
        10**1_000_000,
        "\ud800" + "x" * 10_000_000,
    ],
    ids=["deep", "deeper", "surrogate", "surrogate in a name", "nan", "digits", "10 MB"],
)
@pytest.mark.parametrize("schema", [{}, {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}])
def test_what_is_no_value_of_a_models_is_a_violation_of_any_schema(schema: dict[str, Any], value: object) -> None:
    with pytest.raises(ArgumentsInvalid):
        Arguments(of(value=schema)).parse({"value": value})


def test_a_nul_is_a_character() -> None:
    assert Arguments(of(value={"type": "string"})).parse({"value": "a\x00b"}) == {"value": "a\x00b"}


def test_types_are_found_through_references_that_explode_or_cycle() -> None:
    bomb = doubled(40)
    cycle = {**of(x={"$ref": "#/$defs/a"}), "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}}
    wide: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(1, 8):
        wide[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}] * 50}
    began = time.process_time()
    for schema, read in ((bomb, "5"), (cycle, 5), ({**of(x={"$ref": "#/$defs/d7"}), "$defs": wide}, 5)):
        raw = "<function=t>\n<parameter=x>\n5\n</parameter>\n</function>"
        pieces = [Marker("<tool_call>"), raw, Marker("</tool_call>")]
        (call,) = QwenXml().read(pieces, {"t": schema}, cut=False).calls
        assert call.arguments == {"x": read}
        assert list(properties_of(schema)) == ["x"]
    assert time.process_time() - began < QUICK_SECONDS
