"""Generates the documentation of the chart's values: the table in its README and values.schema.json.

The source is values.yaml. The comment above a key is its description. The type is that of the value, or given in a
comment line: `@type string or null`, `@type list of object`, `@type map of quantity`, `@enum Always, Never`, `@min 1`.
Values with a given type are not inspected. The section `jobs` has the types of
`kestrl_operator.state.chart_values.Cluster`, which reads it.

With `--check` it reports committed files that are stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kestrl_operator.state.accelerators import Profile
from kestrl_operator.state.chart_values import Cluster

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "kestrl"
START, END = "<!-- values: made by `make gen` from values.yaml -->", "<!-- end of values -->"
Schema = dict[str, Any]
SCALARS: Mapping[str, Schema] = {
    "string": {"type": "string"},
    "integer": {"type": "integer", "minimum": 0},
    "number": {"type": "number", "minimum": 0},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "null": {"type": "null"},
    "quantity": {"type": ["string", "number"], "pattern": r"^\d+(\.\d+)?([munkMGTPE]|[KMGTPE]i)?$"},
}
"""Types by their names in `@type`. `object` is a Kubernetes object, validated by Kubernetes."""
REF = "#/$defs/"


class ValuesError(Exception):
    """values.yaml has an invalid hint, or a value without a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A key of values.yaml."""

    path: str
    about: str
    default: Any
    hints: Mapping[str, str]
    """Hints of `@` lines."""
    inner: Sequence[Value]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def read_values(text: str) -> list[Value]:
    """Every key of values.yaml with the comment above it."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    values: dict[str, Any] = yaml.safe_load(text)
    return list(_keys(node, values, text.splitlines(), ""))


def _keys(node: Any, values: Mapping[str, Any], lines: Sequence[str], above: str) -> Iterator[Value]:
    for key, held in node.value:
        path = f"{above}{key.value}"
        about, hints = _comment(lines, key.start_mark.line, path)
        default: Any = values[key.value]
        inside = isinstance(held, yaml.MappingNode) and "type" not in hints
        inner = list(_keys(held, default, lines, f"{path}.")) if inside else []
        yield Value(path=path, about=about, default=default, hints=hints, inner=inner)


def _comment(lines: Sequence[str], line: int, path: str) -> tuple[str, dict[str, str]]:
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    comments = [text.strip().removeprefix("#").strip() for text in lines[first:line]]
    hints = dict(text[1:].split(" ", 1) for text in comments if text.startswith("@"))
    about = " ".join(text for text in comments if not text.startswith("@"))
    if not about:
        raise ValuesError(f"{path} has no comment that describes it")
    if unknown := set(hints) - {"type", "enum", "min"}:
        raise ValuesError(f"{path}: unknown hint @{', @'.join(sorted(unknown))}")
    return about, hints


def parse_type(words: str) -> Schema:
    """Schema of a type name, such as `list of string or null`."""
    kinds = words.split(" or ")
    if len(kinds) > 1:
        return {"anyOf": [parse_type(kind) for kind in kinds]}
    if words.startswith("list of "):
        return {"type": "array", "items": parse_type(words.removeprefix("list of "))}
    if words.startswith("map of "):
        return {"type": "object", "additionalProperties": parse_type(words.removeprefix("map of "))}
    if words not in SCALARS:
        raise ValuesError(f"@type {words}: types are {', '.join(SCALARS)}, list of ..., map of ..., ... or ...")
    return dict(SCALARS[words])


def inferred(value: Value) -> Schema:
    """Schema inferred from a value."""
    match value.default:
        case bool():
            return parse_type("boolean")
        case int():
            return parse_type("integer")
        case str():
            return parse_type("string")
        case _:
            raise ValuesError(f"{value.path} needs a line `# @type`: {value.default!r} does not determine its type")


def schema_of(value: Value) -> Schema:
    """Schema of a value with its contents."""
    if value.inner:
        made = closed({item.name: schema_of(item) for item in value.inner})
    else:
        made = parse_type(value.hints["type"]) if "type" in value.hints else inferred(value)
    if "enum" in value.hints:
        made["enum"] = value.hints["enum"].split(", ")
    if "min" in value.hints:
        made["minimum"] = int(value.hints["min"])
    return {"description": value.about, **made}


def closed(properties: Mapping[str, Schema]) -> Schema:
    """An object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def chart_schema(values: Sequence[Value]) -> Schema:
    """values.schema.json."""
    jobs, shared = cluster_schema()
    properties = {value.name: jobs if value.name == "jobs" else schema_of(value) for value in values}
    for value in values:
        if value.name == "jobs":
            describe(value, jobs, shared)
    # Helm passes `global` of the chart around this one, with what other charts have in it.
    properties["global"]["additionalProperties"] = True
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart kestrl",
        **closed(properties),
        "$defs": shared,
    }


def cluster_schema() -> tuple[Schema, dict[str, Schema]]:
    """Schema of the section `jobs`, which the operator reads, and its definitions."""
    made, profile = plain(Cluster.model_json_schema()), plain(Profile.model_json_schema())
    shared = {**made.pop("$defs", {}), **profile.pop("$defs", {})}
    profile.pop("required", None)  # a profile with the name of a built-in one overrides it and may be partial
    shared["Profile"] = profile
    made["properties"]["accelerators"] = {"type": "object", "additionalProperties": {"$ref": f"{REF}Profile"}}
    return made, shared


def plain(schema: Schema) -> Schema:
    """Schema of a model without descriptions and titles that repeat its code or values.yaml."""
    made: Schema = {}
    for word, meaning in schema.items():
        if word in {"properties", "$defs"}:
            made[word] = {name: plain(item) for name, item in meaning.items()}
        elif word in {"anyOf", "prefixItems"}:
            made[word] = [plain(item) for item in meaning]
        elif word in {"items", "additionalProperties"}:
            made[word] = meaning if isinstance(meaning, bool) else plain(meaning)
        elif word not in {"title", "default", "description"}:
            made[word] = meaning
    return made


def describe(value: Value, schema: Schema, shared: Mapping[str, Schema]) -> None:
    """Adds descriptions and defaults of values.yaml to a schema.

    Raises:
        ValuesError: values.yaml and the schema have different keys.
    """
    schema["description"] = value.about
    target = resolve(schema, shared)
    if "properties" not in target:
        return
    known, documented = target["properties"], {item.name: item for item in value.inner}
    if known.keys() != documented.keys():
        differ = ", ".join(f"{value.path}.{name}" for name in sorted(known.keys() ^ documented.keys()))
        raise ValuesError(f"values.yaml and kestrl_operator.state.chart_values do not have the same keys: {differ}")
    for name, item in documented.items():
        describe(item, known[name], shared)


def resolve(schema: Schema, shared: Mapping[str, Schema]) -> Schema:
    """Resolves a reference to a schema."""
    return shared[schema["$ref"].removeprefix(REF)] if "$ref" in schema else schema


def words_of(schema: Schema, shared: Mapping[str, Schema]) -> str:
    """Name of a type for people."""
    schema = resolve(schema, shared)
    if "anyOf" in schema:
        return " or ".join(words_of(item, shared) for item in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{item}`" for item in schema["enum"])
    if "pattern" in schema and isinstance(schema["type"], list):
        return "quantity"
    kind = schema["type"]
    if kind == "array":
        return f"list of {words_of(schema['items'], shared)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {words_of(schema['additionalProperties'], shared)}"
    return str(kind)


def rows(value: Value, schema: Schema, shared: Mapping[str, Schema]) -> Iterator[str]:
    """Table rows of a value and its contents."""
    if value.inner:
        yield f"| `{value.path}` | | | {value.about} |"
        target = resolve(schema, shared)
        for item in value.inner:
            yield from rows(item, target.get("properties", {}).get(item.name) or target["additionalProperties"], shared)
    else:
        default = json.dumps(value.default, ensure_ascii=False)
        yield f"| `{value.path}` | {words_of(schema, shared)} | `{default}` | {value.about} |"


def table(values: Sequence[Value], schema: Schema) -> str:
    """Table of all values for the README."""
    lines = ["| value | type | default | what it is |", "|---|---|---|---|"]
    for value in values:
        lines += rows(value, schema["properties"][value.name], schema["$defs"])
    return "\n".join(lines)


def with_table(readme: str, made: str) -> str:
    """README with the table replaced."""
    block = re.compile(f"{re.escape(START)}.*{re.escape(END)}", re.DOTALL)
    if not block.search(readme):
        raise ValuesError(f"charts/kestrl/README.md has no markers for the table: {START} ... {END}")
    return block.sub(lambda _: f"{START}\n\n{made}\n\n{END}", readme)


def files() -> Iterator[tuple[Path, str]]:
    values = read_values((CHART / "values.yaml").read_text())
    schema = chart_schema(values)
    yield CHART / "values.schema.json", json.dumps(schema, indent=2) + "\n"
    readme = CHART / "README.md"
    yield readme, with_table(readme.read_text(), table(values, schema))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file is not what values.yaml gives")
    check = parser.parse_args().check
    try:
        made = list(files())
    except ValuesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        stale = [path for path, text in made if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run `make gen`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in made:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
