"""The CustomResourceDefinitions of AgentRLJob and SFTJob, generated from the models of the manifests. Pure.

Kubernetes requires a structural schema: no references, no unions of types, `nullable` instead of null. Other rules are
CEL expressions, with the messages of `rules.py` where both exist; the operator reports all others in a condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from kestrl.spec.job import KIND, JobSpec
from kestrl.spec.scalars import format_duration
from kestrl.spec.sft import SFT_KIND, SFTSpec
from kestrl.spec.status import JobStatus, SFTJobStatus

GROUP, VERSION = "kestrl.dev", "v1alpha1"
PLURAL, SINGULAR, SHORT = "agentrljobs", "agentrljob", "arlj"
SFT_PLURAL, SFT_SINGULAR = "sftjobs", "sftjob"
LONGEST_STRING, LONGEST_LIST, LARGEST_MAP = 2048, 64, 64
"""Bounds for fields without one in the models; Kubernetes estimates the cost of CEL rules from them."""
KEPT = (
    "type", "description", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip
"""Keywords with the same meaning in both schema dialects."""
IDENTITY = ("model", "data", "agent", "tools", "rewards", "sampling", "evaluation", "algorithm")
"""Immutable parts of the spec, which identify a run."""
COLUMNS = (
    ("Phase", "string", ".status.shown.phase"),
    ("Step", "string", ".status.shown.step"),
    ("Policy", "string", ".status.shown.policy"),
    ("Converged", "string", ".status.shown.converged"),
    ("Lag", "integer", ".status.shown.lag"),
    ("Reward", "string", ".status.shown.reward"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
SFT_COLUMNS = (
    ("Phase", "string", ".status.shown.phase"),
    ("Result", "string", ".status.result.uri"),
    ("Restarts", "integer", ".status.restarts"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


Rules = Mapping[tuple[str, ...], tuple[dict[str, str], ...]]
"""CEL rules by their position in the schema; `[]` is an item of a list."""


def rule(expression: str, message: str, path: str | None = None) -> dict[str, str]:
    """A CEL rule; `path` is the reported field."""
    return {"rule": expression, "message": message} | ({} if path is None else {"fieldPath": path})


SPEC_RULES = (
    *(
        rule(f"self.{part} == oldSelf.{part}", f"{part} cannot change under a job; make another job", f".{part}")
        for part in IDENTITY
    ),
    rule(
        "has(self.storage.uri) == has(oldSelf.storage.uri) && (!has(self.storage.uri) || self.storage.uri == "
        "oldSelf.storage.uri)",
        "storage.uri cannot change under a job: its run lies there; make another job",
        ".storage.uri",
    ),
    rule(
        "self.inference.adapterSlots >= self.algorithm.maxStaleness + 2",
        "cannot hold every version a rollout may still need: maxStaleness + 2; raise it or lower "
        "algorithm.maxStaleness",
        ".inference.adapterSlots",
    ),
    rule(
        "self.algorithm.groupSize <= self.rollout.concurrency",
        "cannot hold one group of algorithm.groupSize; raise it",
        ".rollout.concurrency",
    ),
    rule(
        "self.agent.maxTokens < self.inference.contextLength",
        "leaves no room for a prompt in inference.contextLength; lower it or raise contextLength",
        ".agent.maxTokens",
    ),
    rule(
        "!has(self.schedule.evalEvery) || has(self.data.validation)",
        "there is nothing to evaluate on: add data.validation",
        ".schedule.evalEvery",
    ),
)
PLACED_RULES: Rules = {
    ("spec",): SPEC_RULES,
    ("spec", "rollout", "deadlines"): (
        rule(
            "duration(self.tool) < duration(self.turn)", "deadlines nest: tool < turn < episode < group < step", ".turn"
        ),
        rule(
            "duration(self.turn) < duration(self.episode)",
            "deadlines nest: tool < turn < episode < group < step",
            ".episode",
        ),
        rule(
            "!has(self.group) || duration(self.episode) < duration(self.group)",
            "deadlines nest: tool < turn < episode < group < step",
            ".group",
        ),
        rule(
            "!has(self.step) || duration(has(self.group) ? self.group : self.episode) < duration(self.step)",
            "deadlines nest: tool < turn < episode < group < step",
            ".step",
        ),
    ),
    ("spec", "algorithm"): (
        rule("self.groupSize >= 2", "episodes are scored relative to their group: it needs at least 2", ".groupSize"),
        rule(
            "self.onFailedEpisode != 'shrink' || self.minGroupSize <= self.groupSize",
            "is above groupSize; lower it",
            ".minGroupSize",
        ),
        rule(
            "self.miniBatches <= self.groupsPerStep",
            "is above groupsPerStep, so that an update would have no group; lower it",
            ".miniBatches",
        ),
        rule(
            "self.correction.low <= self.correction.high",
            "correction.low is above correction.high; lower it",
            ".correction.low",
        ),
        rule(
            "self.correction.rejectBelow <= self.correction.rejectAbove",
            "correction.rejectBelow is above correction.rejectAbove; lower it",
            ".correction.rejectBelow",
        ),
    ),
    ("spec", "sampling"): (
        rule(
            "self.temperature > 0.0",
            "0 samples the same episode every time, so there is nothing to learn from; use 1.0",
            ".temperature",
        ),
    ),
    ("spec", "evaluation"): (
        rule(
            "!has(self.temperature) || self.temperature > 0.0 || self.samples == 1",
            "0 samples the same episode several times; raise it, or set samples to 1",
            ".temperature",
        ),
        rule(
            "!has(self.temperature) || self.temperature > 0.0 || (self.topP == 1.0 && self.topK == 0)",
            "0 takes the most probable token, whatever topP and topK are; raise it, or set them to 1 and 0",
            ".temperature",
        ),
    ),
    ("spec", "failurePolicy", "rules", "[]"): (
        rule(
            "!has(self.role) || self.role == 'learner' || !self.reason.contains('/')",
            "only the learner reports failures as boundary/code; remove role, or name a container's reason such as "
            "OOMKilled",
            ".role",
        ),
    ),
    ("spec", "tools", "[]"): (
        rule(
            "(has(self.use) ? 1 : 0) + (has(self.mcp) ? 1 : 0) + (has(self.http) ? 1 : 0) == 1",
            "give use, mcp or http, and one of them only",
        ),
        rule(
            "!has(self.http) || has(self.http.openapi) != has(self.http.endpoints)",
            "give either openapi or endpoints, and one of them only",
            ".http",
        ),
        rule(
            "!has(self.mcp) || has(self.mcp.command) != has(self.mcp.url)",
            "give either command or url, and one of them only",
            ".mcp",
        ),
    ),
    ("spec", "rewards", "[]"): (
        rule("has(self.rule) != has(self.ruler)", "give either rule or ruler, and one of them only"),
        rule(
            "!has(self.ruler) || has(self.ruler.baseUrl) != (has(self.ruler.self) && self.ruler.self)",
            "give baseUrl and model of an OpenAI-compatible server, or self: true, and one of them only",
            ".ruler",
        ),
        rule(
            "!has(self.ruler) || has(self.ruler.baseUrl) == has(self.ruler.model)",
            "give the name of the judge model on the server, with baseUrl",
            ".ruler.model",
        ),
        rule("!has(self.correctness) || has(self.rule)", "belongs to a rule; a ruler takes none", ".correctness"),
        rule(
            "!has(self.correctness) || has(self.correctness.baseUrl) != "
            "(has(self.correctness.self) && self.correctness.self)",
            "give baseUrl and model of an OpenAI-compatible server, or self: true, and one of them only",
            ".correctness",
        ),
        rule(
            "!has(self.correctness) || has(self.correctness.baseUrl) == has(self.correctness.model)",
            "give the name of the judge model on the server, with baseUrl",
            ".correctness.model",
        ),
    ),
}
"""CEL rules of AgentRLJob."""
_SOURCE_RULES = (
    rule("has(self.uri) != has(self.episodes)", "give either uri or episodes, and one of them only"),
    rule("!has(self.minReward) || has(self.episodes)", "selects episodes; rows have no reward", ".minReward"),
)
SFT_RULES: Rules = {
    ("spec",): (rule("self == oldSelf", "the spec cannot change under a job; make another job"),),
    ("spec", "data", "train"): _SOURCE_RULES,
    ("spec", "data", "validation"): _SOURCE_RULES,
}
"""CEL rules of SFTJob."""
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
        "Supervised fine-tuning of an adapter, from which reinforcement learning can start.",
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
                    "additionalPrinterColumns": [{"name": a, "type": b, "jsonPath": c} for a, b, c in columns],
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
                                "status": status,
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


def _convert(given: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> dict[str, Any]:
    node = _resolved(given, context.definitions)
    if "anyOf" in node:
        return _union(node, context, path)
    made: dict[str, Any] = {name: node[name] for name in KEPT if name in node}
    if "const" in node:
        made |= {"type": "string", "enum": [node["const"]]}
    if "exclusiveMinimum" in node:
        made |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if "exclusiveMaximum" in node:
        made |= {"maximum": node["exclusiveMaximum"], "exclusiveMaximum": True}
    _complete(made, node, context, path)
    default = _default(node, made, path)
    if default is not None:
        made["default"] = default
    rules = context.rules.get(path)
    if rules:
        made["x-kubernetes-validations"] = list(rules)
    return made


def _complete(made: dict[str, Any], node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> None:
    """Adds contents and bounds according to the type of the node."""
    kind = made.get("type")
    if kind == "object":
        _fill_object(made, node, context, path)
    elif kind == "array":
        made["items"] = _convert(node.get("items", {}), context, (*path, "[]"))
        made.setdefault("maxItems", LONGEST_LIST)
    elif kind == "string" and "enum" not in made:
        made.setdefault("maxLength", LONGEST_STRING)
        if path[:3] == ("spec", "rollout", "deadlines"):
            made["pattern"] = DURATION_UNITS
    elif kind is None:
        made["x-kubernetes-preserve-unknown-fields"] = True  # any JSON value: a tool's own configuration


def _fill_object(made: dict[str, Any], node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> None:
    properties: Mapping[str, Any] | None = node.get("properties")
    if properties is not None:
        made["properties"] = {name: _convert(inner, context, (*path, name)) for name, inner in properties.items()}
        if node.get("required"):
            made["required"] = node["required"]
        return
    inner: Any = node.get("additionalProperties")
    if isinstance(inner, Mapping):
        made["additionalProperties"] = _convert(inner, context, (*path, "*"))  # pyright: ignore[reportUnknownArgumentType]
        made["maxProperties"] = LARGEST_MAP
    else:
        made["x-kubernetes-preserve-unknown-fields"] = True


def _union(node: Mapping[str, Any], context: _Context, path: tuple[str, ...]) -> dict[str, Any]:
    """Converts `X | None` to an optional X; other unions have no structural schema."""
    kinds = [kind for kind in node["anyOf"] if kind.get("type") != "null"]
    outer = {name: node[name] for name in ("description",) if name in node}
    made = _convert(kinds[0], context, path) if len(kinds) == 1 else {"x-kubernetes-preserve-unknown-fields": True}
    default = _default(node, made, path)
    return {**made, **outer, **({} if default is None else {"default": default})}


def _default(node: Mapping[str, Any], made: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Default for the API server to fill in, or None. A status has observations only, and no defaults."""
    default = node.get("default")
    if default is None or path[0] == "status":
        return None
    if made.get("type") == "object":
        # Written out in full, since the API server evaluates rules on the default as it is.
        properties: Mapping[str, Mapping[str, Any]] = made.get("properties", {})
        return {name: inner["default"] for name, inner in properties.items() if "default" in inner}
    if made.get("type") == "string" and isinstance(default, int | float):
        return format_duration(float(default))  # seconds in the models, 30s in the manifest
    return default


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The node with its reference resolved; keywords next to the reference take precedence."""
    merged = dict(node)
    while "$ref" in merged:
        target = definitions[str(merged.pop("$ref")).rpartition("/")[2]]
        merged = {**target, **merged}
    return merged
