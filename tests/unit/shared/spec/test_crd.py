"""The CRD: structural as Kubernetes wants it, small, and of one mind with the models that `kestrl run` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator, Draft202012Validator

from kestrl._shared.spec import parse_job
from kestrl._shared.spec.crd import crd, definition_yaml, sft_crd
from kestrl._shared.spec.job import JobSpec, job_schema
from kestrl._shared.spec.rules.crd_rules import IDENTITY, OPTIONAL, PLACED_RULES
from kestrl._shared.spec.sft import parse_sft_job

EXAMPLES = [
    path
    for path in sorted(Path(__file__).parents[4].glob("examples/**/*.yaml"))
    if next(yaml.safe_load_all(path.read_text()))["kind"] == "AgentRLJob"
]
CEL = "x-kubernetes-validations"
VERSION = crd()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside, with where it stands."""
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from nodes(node[name], f"{path}[]")


def at(path: tuple[str, ...]) -> dict[str, Any]:
    node = SCHEMA
    for part in path:
        node = node["items"] if part == "[]" else node["properties"][part]
    return node


def test_it_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert not {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "nullable"} & set(node), path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields") is True, path
        assert not ("properties" in node and "additionalProperties" in node), path
        if node.get("type") == "array":
            assert node["maxItems"] <= 256, path
        if node.get("type") == "string" and "enum" not in node and path.startswith(".spec"):
            assert "maxLength" in node, path


def test_every_default_is_valid_and_a_status_is_unobserved() -> None:
    defaults = [(path, node["default"], node) for path, node in nodes(SCHEMA) if "default" in node]
    assert len(defaults) > 30
    for path, default, node in defaults:
        assert path.startswith(".spec") or (path, default) == (".status", {"observedGeneration": -1}), path
        Draft4Validator(node).validate(with_defaults(default, node))
    deadlines = with_defaults({}, SCHEMA["properties"]["spec"])["rollout"]["deadlines"]
    assert deadlines == {"tool": "30s", "turn": "2m", "episode": "10m"}


def test_it_is_small() -> None:
    """A client's `kubectl apply` keeps it as JSON in an annotation, and annotations may have 262,144 bytes in all."""
    assert len(definition_yaml(crd())) < 122_000
    assert len(json.dumps(crd())) < 80_000
    assert "&id" not in definition_yaml(crd())


def test_the_definition_of_sftjobs_takes_what_kestrl_sft_reads() -> None:
    version = sft_crd()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    for path, node in nodes(schema):
        assert not {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "nullable"} & set(node), path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields") is True, path
        assert ("default" in node) <= (path.startswith(".spec") or path == ".status"), path
    starters = Path(__file__).parents[4] / "src" / "kestrl" / "_app" / "starters" / "files"
    document = yaml.safe_load((starters / "tool" / "sft.yaml").read_text())
    Draft4Validator(schema["properties"]["spec"]).validate(document["spec"])
    parse_sft_job({**document, "spec": with_defaults(document["spec"], schema["properties"]["spec"])})
    rules = {path: len(node["x-kubernetes-validations"]) for path, node in nodes(schema) if CEL in node}
    assert rules == {"": 2, ".spec": 1, ".spec.data.train": 2, ".spec.data.validation": 2}


def test_every_field_is_described_by_its_docstring() -> None:
    described = [path for path, node in nodes(SCHEMA["properties"]["spec"]) if node.get("description")]
    assert ".algorithm.maxStaleness" in described
    assert ".inference.adapterSlots" in described
    assert len(described) >= 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    Draft4Validator(SCHEMA).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_what_the_apiserver_fills_in_is_what_the_models_fill_in(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    filled = parse_job({**document, "spec": with_defaults(document["spec"], SCHEMA["properties"]["spec"])})
    assert filled.spec == parse_job(document).spec


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """As the apiserver does it: a missing field with a default gets it, and then its own fields theirs."""
    if isinstance(value, list):
        return [with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, inner in schema.get("properties", {}).items():
        if name not in filled and "default" in inner:
            filled[name] = inner["default"]
        if name in filled:
            filled[name] = with_defaults(filled[name], inner)
    return filled


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"algorithm": {"learningRate": 0}}, "learningRate"),
        ({"algorithm": {"name": "ppo"}}, "name"),
        ({"algorithm": {"clip": {"low": 1.5}}}, "low"),
        ({"rollout": {"deadlines": {"tool": "soon"}}}, "tool"),
        ({"rollout": {"deadlines": {"episode": "1d"}}}, "episode"),
        ({"inference": {"replicas": 0}}, "replicas"),
        ({"tools": [{"name": "t", "use": "no colon"}]}, "use"),
        ({"model": {"base": ""}}, "base"),
        ({"rewards": []}, "rewards"),
        ({"failurePolicy": {"backoffLimit": -1}}, "backoffLimit"),
        ({"failurePolicy": {"rules": [{"reason": "*"}]}}, "action"),
        ({"failurePolicy": {"rules": [{"action": "Retry"}]}}, "action"),
        ({"failurePolicy": {"rules": [{"action": "Fail", "reason": "engine/"}]}}, "reason"),
        ({"failurePolicy": {"rules": [{"action": "Fail", "role": "engine"}]}}, "role"),
        ({"patches": [{"template": {"spec": {}}}]}, "role"),
        ({"patches": [{"role": "tools", "remove": ["spec"]}]}, "remove"),
        ({"patches": [{"role": "tools", "template": []}]}, "template"),
        ({"pendingDeadline": "soon"}, "pendingDeadline"),
    ],
)
def test_what_is_wrong_is_refused_and_the_field_named(change: dict[str, Any], field: str) -> None:
    document = yaml.safe_load(EXAMPLES[-1].read_text())
    for part, inner in change.items():
        document["spec"][part] = {**document["spec"].get(part, {}), **inner} if isinstance(inner, dict) else inner
    errors = list(Draft4Validator(SCHEMA).iter_errors(document))
    assert any(field in error.message or field in map(str, error.path) for error in errors)


def test_rules_stand_where_their_fields_are() -> None:
    for path, rules in PLACED_RULES.items():
        node = at(path)
        assert node["x-kubernetes-validations"] == list(rules)
        for item in rules:
            if "fieldPath" in item:
                at((*path, *item["fieldPath"].strip(".").split(".")))
            for name in re.findall(r"\bself((?:\.[a-zA-Z]+\b(?!\())+)", item["rule"]):
                at((*path, *name.strip(".").split(".")))


def test_a_patch_may_say_whatever_a_pod_template_may() -> None:
    template = at(("spec", "patches", "[]", "template"))
    assert (template["type"], template["x-kubernetes-preserve-unknown-fields"]) == ("object", True)
    assert "properties" not in template
    assert at(("spec", "patches", "[]"))["required"] == ["role"], "it may only remove"
    assert at(("spec", "patches", "[]", "role"))["enum"] == [
        "inference",
        "rollout",
        "agent",
        "tools",
        "judge",
        "learner",
    ]


def test_what_a_failure_leads_to_has_defaults() -> None:
    policy = SCHEMA["properties"]["spec"]["properties"]["failurePolicy"]
    assert with_defaults({}, SCHEMA["properties"]["spec"])["failurePolicy"] == {"backoffLimit": 3, "rules": []}
    assert with_defaults({"rules": [{"action": "Fail"}]}, policy)["rules"] == [{"reason": "*", "action": "Fail"}]
    assert "default" not in at(("spec", "pendingDeadline"))


@pytest.mark.parametrize(
    "change",
    [
        {"failurePolicy": {"backoffLimit": 0, "rules": [{"role": "tools", "reason": "OOMKilled", "action": "Fail"}]}},
        {"patches": [{"role": "learner", "template": {"spec": {"containers": [{"name": "learner", "x": [1]}]}}}]},
        {"pendingDeadline": "1d", "activeDeadline": "2d"},
    ],
)
def test_what_a_cluster_alone_knows_is_taken(change: dict[str, Any]) -> None:
    document = yaml.safe_load(EXAMPLES[-1].read_text())
    document["spec"] |= change
    Draft4Validator(SCHEMA).validate(document)
    parse_job(document)


def test_what_makes_a_run_what_it_is_cannot_change() -> None:
    frozen = {item["fieldPath"].removeprefix(".") for item in PLACED_RULES["spec",] if "oldSelf" in item["rule"]}
    assert frozen - {"storage.uri"} == set(IDENTITY) <= set(JobSpec.model_json_schema(by_alias=True)["properties"])
    assert "storage.uri" in frozen, "a run keeps its storage"
    required, properties = SCHEMA["properties"]["spec"]["required"], SCHEMA["properties"]["spec"]["properties"]
    absent = {part for part in IDENTITY if part not in required and "default" not in properties[part]}
    assert absent == OPTIONAL, "rules ask for a part that may be missing by has()"


def test_an_environment_brings_the_reward_of_a_job_that_names_none() -> None:
    document = yaml.safe_load(EXAMPLES[-1].read_text())
    document["spec"].pop("rewards")
    document["spec"] |= {"tools": [], "environment": {"reasoningGym": {"generator": "chain_sum"}}}
    Draft4Validator(SCHEMA).validate(document)
    Draft202012Validator(job_schema()).validate(document)
    (reward,) = parse_job(document).spec.rewards
    assert reward.rule == "environment_reward"


def test_kubectl_get_prints_what_the_status_has() -> None:
    columns = VERSION["additionalPrinterColumns"]
    names = ["Phase", "Step", "Policy", "Converged", "Lag", "Reward", "Idle", "Age", "Reason"]
    assert [column["name"] for column in columns] == names
    assert [column["name"] for column in columns if column.get("priority")] == ["Reason"], "columns of -o wide alone"
    for column in columns[:7]:
        assert at(tuple(column["jsonPath"].strip(".").split(".")))["type"] == column["type"]
    scale = VERSION["subresources"]["scale"]
    for path in scale.values():
        at(tuple(path.strip(".").split(".")))
