"""The CustomResourceDefinitions of AgentRLJob and SFTJob, generated from the models of the manifests. Pure.

Kubernetes requires a structural schema: no references, no unions of types, `nullable` instead of null. Other rules are
CEL expressions, with the messages of `rules.py` where both exist; the operator reports all others in a condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from kestrl._shared.spec.job import KIND, JobSpec
from kestrl._shared.spec.rules.crd_rules import PLACED_RULES, SFT_RULES, Rules, rule
from kestrl._shared.spec.scalars import format_duration
from kestrl._shared.spec.sft import SFT_KIND, SFTSpec
from kestrl._shared.spec.status import JobStatus, SFTJobStatus, shown_columns

GROUP, VERSION = "kestrl.dev", "v1alpha1"
PLURAL, SINGULAR, SHORT = "agentrljobs", "agentrljob", "arlj"
SFT_PLURAL, SFT_SINGULAR = "sftjobs", "sftjob"
NEVER_OBSERVED = -1
"""The `status.observedGeneration` of a job that no operator has seen, by default."""
LONGEST_STRING, LONGEST_LIST, LARGEST_MAP = 2048, 64, 64
"""Bounds for fields without one in the models; Kubernetes estimates the cost of CEL rules from them."""
KEPT = (
    "type", "description", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip
"""Keywords with the same meaning in both schema dialects."""
AGE = ("Age", "date", ".metadata.creationTimestamp")
WIDE = frozenset({"Reason"})
"""Columns of `kubectl get -o wide` alone."""
_SHOWN = [(name.capitalize(), kind, f".status.shown.{name}") for name, kind in shown_columns()]
COLUMNS = (*(each for each in _SHOWN if each[0] not in WIDE), AGE, *(each for each in _SHOWN if each[0] in WIDE))
SFT_COLUMNS = (
    ("Phase", "string", ".status.shown.phase"),
    ("Result", "string", ".status.result.uri"),
    ("Restarts", "integer", ".status.restarts"),
    AGE,
)


DURATION_UNITS = r"^(?:\d+(?:\.\d+)?(?:ms|s|m|h))+$"
"""Duration units where CEL compares durations, which has no days."""


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition of AgentRLJob as an object."""
    return _definition(
        {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": SINGULAR, "shortNames": [SHORT]},
        "A training run of a tool-using language-model agent.",
        spec=structural(JobSpec.model_json_schema(by_alias=True), ("spec",)),
        status=structural(JobStatus.model_json_schema(by_alias=True), ("status",)),
        columns=COLUMNS,
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.rollout.replicas",
                "statusReplicasPath": ".status.rolloutReplicas",
                "labelSelectorPath": ".status.rolloutSelector",
            },
        },
    )


def sft_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of SFTJob as an object."""
    return _definition(
        {"kind": SFT_KIND, "listKind": f"{SFT_KIND}List", "plural": SFT_PLURAL, "singular": SFT_SINGULAR},
        "Supervised fine-tuning of an adapter or of a model, from which reinforcement learning can start.",
        spec=structural(SFTSpec.model_json_schema(by_alias=True), ("spec",), SFT_RULES),
        status=structural(SFTJobStatus.model_json_schema(by_alias=True), ("status",), SFT_RULES),
        columns=SFT_COLUMNS,
        subresources={"status": {}},
    )


def _definition(
    names: Mapping[str, Any],
    description: str,
    *,
    spec: Mapping[str, Any],
    status: Mapping[str, Any],
    columns: Sequence[tuple[str, str, str]],
    subresources: Mapping[str, Any],
) -> dict[str, Any]:
    """A CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": dict(names),
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        {"name": a, "type": b, "jsonPath": c, **({"priority": 1} if a in WIDE else {})}
                        for a, b, c in columns
                    ],
                    "subresources": dict(subresources),
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": description,
                            "required": ["spec"],
                            "properties": {
                                **{key: {"type": "string"} for key in ("apiVersion", "kind")},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                # kstatus takes an object without a status for one that is as its spec says.
                                "status": {**status, "default": {"observedGeneration": NEVER_OBSERVED}},
                            },
                            "x-kubernetes-validations": [
                                rule(
                                    "size(self.metadata.name) <= 40",
                                    "metadata.name can have at most 40 characters, since names of pods are derived "
                                    "from it",
                                ),
                                rule(
                                    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                                    "metadata.name must begin with a letter and have only lower-case letters, "
                                    "digits and -: Services are named after it",
                                ),
                            ],
                        }
                    },
                }
            ],
        },
    }


def definition_yaml(definition: Mapping[str, Any]) -> str:
    """A CustomResourceDefinition as YAML for the chart."""

    class Plain(yaml.SafeDumper):
        """YAML dumper without anchors."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
            return True

    return yaml.dump(dict(definition), Dumper=Plain, sort_keys=False, allow_unicode=True, width=140)


def structural(schema: Mapping[str, Any], path: tuple[str, ...], rules: Rules = PLACED_RULES) -> dict[str, Any]:
    """Converts a JSON schema to a structural schema with CEL rules."""
    return _convert(schema, _Context(schema.get("$defs", {}), rules), path)


class _Context(NamedTuple):
    """What holds for a whole schema."""

    definitions: Mapping[str, Any]
    rules: Rules


def _convert(schema: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> dict[str, Any]:
    node = _resolved(schema, context.definitions)
    if "anyOf" in node:
        return _union(node, context, path)
    converted: dict[str, Any] = {name: node[name] for name in KEPT if name in node}
    if "const" in node:
        converted |= {"type": "string", "enum": [node["const"]]}
    if "exclusiveMinimum" in node:
        converted |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if "exclusiveMaximum" in node:
        converted |= {"maximum": node["exclusiveMaximum"], "exclusiveMaximum": True}
    _complete(converted, node, context, path)
    default = _default(node, converted, path)
    if default is not None:
        converted["default"] = default
    rules = context.rules.get(path)
    if rules:
        converted["x-kubernetes-validations"] = list(rules)
    return converted


def _complete(converted: dict[str, Any], node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> None:
    """Adds contents and bounds according to the type of the node."""
    kind = converted.get("type")
    if kind == "object":
        _fill_object(converted, node, context, path)
    elif kind == "array":
        converted["items"] = _convert(node.get("items", {}), context, (*path, "[]"))
        converted.setdefault("maxItems", LONGEST_LIST)
    elif kind == "string" and "enum" not in converted:
        converted.setdefault("maxLength", LONGEST_STRING)
        if path[:3] == ("spec", "rollout", "deadlines"):
            converted["pattern"] = DURATION_UNITS
    elif kind is None:
        converted["x-kubernetes-preserve-unknown-fields"] = True  # any JSON value: a tool's own configuration


def _fill_object(converted: dict[str, Any], node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> None:
    properties: Mapping[str, Any] | None = node.get("properties")
    if properties is not None:
        converted["properties"] = {
            name: _convert(subschema, context, (*path, name)) for name, subschema in properties.items()
        }
        if node.get("required"):
            converted["required"] = node["required"]
        return
    subschema: Any = node.get("additionalProperties")
    if isinstance(subschema, Mapping):
        converted["additionalProperties"] = _convert(subschema, context, (*path, "*"))  # pyright: ignore[reportUnknownArgumentType]
        converted["maxProperties"] = LARGEST_MAP
    else:
        converted["x-kubernetes-preserve-unknown-fields"] = True


def _union(node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> dict[str, Any]:
    """Converts `X | None` to an optional X; other unions have no structural schema."""
    kinds = [kind for kind in node["anyOf"] if kind.get("type") != "null"]
    annotations = {name: node[name] for name in ("description",) if name in node}
    converted = _convert(kinds[0], context, path) if len(kinds) == 1 else _any_of(kinds)
    default = _default(node, converted, path)
    return {**converted, **annotations, **({} if default is None else {"default": default})}


def _any_of(kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Any value, with the bounds of the number that it may be."""
    bounds = {name: kind[name] for kind in kinds for name in ("minimum", "maximum") if name in kind}
    return {"x-kubernetes-preserve-unknown-fields": True, **bounds}


def _default(node: Mapping[str, Any], converted: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Default for the API server to fill in, or None. A status has observations only, and no defaults."""
    default = node.get("default")
    if default is None or path[0] == "status":
        return None
    if converted.get("type") == "object":
        # Written out in full, since the API server evaluates rules on the default as it is.
        properties: Mapping[str, Mapping[str, Any]] = converted.get("properties", {})
        return {
            name: property_schema["default"]
            for name, property_schema in properties.items()
            if "default" in property_schema
        }
    if converted.get("type") == "string" and isinstance(default, int | float):
        return format_duration(float(default))  # seconds in the models, 30s in the manifest
    return default


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The node with its reference resolved; keywords next to the reference take precedence."""
    merged = dict(node)
    while "$ref" in merged:
        target = definitions[str(merged.pop("$ref")).rpartition("/")[2]]
        merged = {**target, **merged}
    return merged
