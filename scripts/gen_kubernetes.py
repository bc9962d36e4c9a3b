"""Generates Kubernetes artefacts from the models: the chart's CRD, the list of conditions and reasons, and the
reference of fields.

With `--check` it reports committed files that are stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from kestrl.spec.crd import COLUMNS, IDENTITY, PLACED_RULES, SHORT, crd_yaml
from kestrl.spec.crd import crd as definition
from kestrl.spec.job import API_VERSION, KIND, JobSpec
from kestrl.spec.scalars import Duration, ImportPath, Name, format_duration
from kestrl.spec.status import JobStatus
from kestrl_operator.conditions import NOT_OBSERVED, REASONS

ROOT = Path(__file__).parents[1]
Schema = Mapping[str, Any]


def conditions_page() -> str:
    lines = [
        "# Conditions of an AgentRLJob",
        "",
        "Made by `make gen` from `operator/src/kestrl_operator/conditions.py`; a reason that is not here is never written. A condition says what was",
        f"observed for the generation in its `observedGeneration`; what was not looked at yet is `Unknown` with reason `{NOT_OBSERVED}`.",
    ]
    for kind, reasons in REASONS.items():
        lines += ["", f"## {kind}", "", "| reason | means |", "|---|---|"]
        lines += [f"| `{reason}` | {meaning} |" for reason, meaning in reasons.items()]
    return "\n".join(lines) + "\n"


def _pattern(kind: Any) -> str:
    return str(TypeAdapter[Any](kind).json_schema()["pattern"])


SCALARS = {_pattern(Duration): "duration", _pattern(Name): "name", _pattern(ImportPath): "import path"}
BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


@dataclass
class Page:
    """Tables of a model and of all nested models, each listed once with every path at which it occurs."""

    definitions: Mapping[str, Schema]
    defaults: bool
    """Whether fields have defaults; a status has none."""
    places: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Paths by the name of the model."""

    def lines(self, schema: Schema, path: str) -> Iterator[str]:
        """Section of the model, then those of nested models."""
        self._find(schema, path)
        models = {"": schema, **{name: self.definitions[name] for name in self.places}}
        for name, model in models.items():
            yield from ("", f"## {self._title(name, path)}", "", str(model["description"]).strip())
            others = self.places.get(name, [])[1:]
            if others:
                yield from ("", f"Also used at {', '.join(f'`{other}`' for other in others)}.")
            head = ("field", "type", *(("default",) if self.defaults else ()), "meaning")
            yield from ("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
            for key, node in model["properties"].items():
                yield f"| {' | '.join(self._row(key, node, model, path if name == '' else ''))} |"

    def _title(self, name: str, path: str) -> str:
        return self.places[name][0] if name else path

    def _find(self, schema: Schema, path: str) -> None:
        for key, node in schema.get("properties", {}).items():
            for name, place in self._models(node, f"{path}.{key}"):
                known = self.places.setdefault(name, [])
                known.append(place)
                self._find(self.definitions[name], place)

    def _models(self, node: Schema, path: str) -> Iterator[tuple[str, str]]:
        if "$ref" in node:
            yield str(node["$ref"]).rpartition("/")[2], path
        for inner in node.get("anyOf", ()):
            yield from self._models(inner, path)
        if isinstance(node.get("items"), dict):
            yield from self._models(node["items"], f"{path}[]")

    def _row(self, key: str, node: Schema, model: Schema, path: str) -> Iterator[str]:
        yield f"`{key}`"
        yield self._type(node)
        if self.defaults:
            yield "required" if key in model.get("required", ()) else self._default(node)
        description = node.get("description") or self._described(node)
        fixed = " Cannot change under a job." if path == "spec" and key in IDENTITY else ""
        yield " ".join(f"{description}{fixed}".split()).replace("|", "\\|")

    def _described(self, node: Schema) -> str:
        return next((str(self.definitions[name].get("description", "")) for name, _ in self._models(node, "")), "")

    def _type(self, node: Schema) -> str:
        kinds = [kind for kind in node.get("anyOf", ()) if kind.get("type") != "null"]
        if kinds:
            return " or ".join(dict.fromkeys(self._type(kind) for kind in kinds))
        if "$ref" in node:
            place = self.places[str(node["$ref"]).rpartition("/")[2]][0]
            return f"[object](#{anchor(place)})"
        if "enum" in node or "const" in node:
            return " or ".join(f"`{item}`" for item in node.get("enum", [node.get("const")]))
        match node.get("type"):
            case "array":
                return f"list of {self._type(node['items'])}"
            case "object" if isinstance(node.get("additionalProperties"), dict):
                return f"map of {self._type(node['additionalProperties'])}"
            case "string":
                return "time" if node.get("format") == "date-time" else SCALARS.get(node.get("pattern", ""), "string")
            case kind:
                bounds = ", ".join(f"{sign} {node[word]:g}" for word, sign in BOUNDS if word in node)
                return f"{kind or 'any'} {bounds}".strip()

    def _default(self, node: Schema) -> str:
        default = node.get("default")
        if default is None:
            return "none"
        if "$ref" in node:
            return "its fields'"
        if "duration" in self._type(node) and isinstance(default, float):
            default = format_duration(default)
        return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def anchor(title: str) -> str:
    """Anchor of a heading."""
    return "".join(letter for letter in title.lower() if letter.isalnum() or letter in "-_")


def tables(model: type[BaseModel], path: str, *, defaults: bool) -> Iterator[str]:
    schema = model.model_json_schema(by_alias=True)
    yield from Page(schema.get("$defs", {}), defaults).lines(schema, path)


def reference_page() -> str:
    version = definition()["spec"]["versions"][0]
    scale = version["subresources"]["scale"]
    lines = [
        f"# Reference: every field of {KIND}",
        "",
        f"Made by `make gen` from `src/kestrl/spec/job.py` and `status.py`. `apiVersion: {API_VERSION}`, `kind: {KIND}`; kubectl knows it as `{SHORT}` too.",
        "`metadata.name` may have 40 characters. A field that is not here is refused. The API server fills in the defaults; `none` is a field that stays out.",
        "",
        "A duration is written as in Go: `30s`, `2m`, `1h30m`; `d` is a day, but for those of `rollout.deadlines`, whose largest unit is `h`. A name is a",
        "DNS label. An import path is `package.module:Name`.",
        *tables(JobSpec, "spec", defaults=True),
        "",
        "## Rules across fields",
        "",
        "The API server refuses what breaks one of these; `*` stands for an item of a list. What its schema cannot say (`src/kestrl/spec/rules.py`) the operator",
        "reports in the condition `Accepted`, reason `Invalid`; `kestrl validate` reports all problems without a cluster.",
        "",
        "| at | is refused with |",
        "|---|---|",
    ]
    for place, rules in PLACED_RULES.items():
        for item in rules:
            path = f"{'.'.join(place).replace('.[]', '[*]')}{item.get('fieldPath', '')}"
            lines.append(f"| `{path}` | {item['message']} |")
    lines += [
        *tables(JobStatus, "status", defaults=False),
        "",
        "## What kubectl prints",
        "",
        "| column | from |",
        "|---|---|",
        *(f"| {name.upper()} | `{path}` |" for name, _, path in COLUMNS),
        "",
        f"`kubectl scale` and autoscalers change `{scale['specReplicasPath']}`, see how many there are in `{scale['statusReplicasPath']}`, and find their pods by",
        f"`{scale['labelSelectorPath']}`.",
    ]
    return "\n".join(lines) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    yield ROOT / "charts" / "kestrl" / "files" / "agentrljobs.kestrl.dev.yaml", crd_yaml()
    yield ROOT / "docs" / "conditions.md", conditions_page()
    yield ROOT / "docs" / "reference.md", reference_page()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file is not what the models give")
    if parser.parse_args().check:
        stale = [path for path, text in files() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run `make gen`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
