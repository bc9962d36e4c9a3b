"""Patches of pods: merged like `kubectl patch`, and refused where they change a reserved field."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.errors import UserInputError
from kestrl_operator.render.patching import MERGE_KEYS, RESERVED_FIELDS, PodPatch, patched

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"kestrl.dev/role": "tools"}, "annotations": {"kestrl.dev/settings": "01"}},
    "spec": {
        "serviceAccountName": "email-search",
        "terminationGracePeriodSeconds": 30,
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "nvidia.com/gpu"}],
        "containers": [
            {
                "name": "tools",
                "image": "r/tools:1",
                "args": ["--settings", "x"],
                "env": [{"name": "HOME", "value": "/tmp"}, {"name": "A", "value": "1"}],
                "ports": [{"name": "grpc", "containerPort": 7000}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            },
        ],
        "initContainers": [{"name": "prepare", "image": "r/tools:1"}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "home", "emptyDir": {}}],
    },
}
PLACE = "spec.patches[0].template"


def merged(*patches: dict[str, Any], base: dict[str, Any] = TEMPLATE) -> dict[str, Any]:
    return patched(base, [PodPatch(f"spec.patches[{index}]", patch) for index, patch in enumerate(patches)])


def at(made: Any, path: str) -> Any:
    """The value at a path; items of lists by their name, None for a missing one."""
    for part in path.split("."):
        if isinstance(made, list):
            made = next((item for item in made if part in {str(value) for value in item.values()}), None)
        else:
            made = None if made is None else made.get(part)
    return made


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def tools(**fields: Any) -> dict[str, Any]:
    return spec(containers=[{"name": "tools", **fields}])


@pytest.mark.parametrize(
    ("patch", "path", "found"),
    [
        (spec(priorityClassName="high"), "spec.priorityClassName", "high"),
        (spec(terminationGracePeriodSeconds=60), "spec.terminationGracePeriodSeconds", 60),
        (spec(nodeSelector={"zone": "x"}), "spec.nodeSelector", {"pool": "a", "zone": "x"}),
        (spec(nodeSelector={"pool": "b"}), "spec.nodeSelector", {"pool": "b"}),
        (spec(nodeSelector={"pool": None}), "spec.nodeSelector", {}),
        (spec(nodeSelector=None), "spec.nodeSelector", None),
        (spec(hostAliases=[{"ip": "10.0.0.1"}]), "spec.hostAliases", [{"ip": "10.0.0.1"}]),
        (spec(affinity={"nodeAffinity": {"a": 1, "b": None}}), "spec.affinity", {"nodeAffinity": {"a": 1}}),
        (spec(tolerations=[{"key": "mine"}]), "spec.tolerations", [{"key": "mine"}]),
        (spec(volumes="none"), "spec.volumes", "none"),
        (tools(image="r/tools:2"), "spec.containers.tools.image", "r/tools:2"),
        (tools(image="r/tools:2"), "spec.containers.tools.args", ["--settings", "x"]),
        (tools(args=["y"]), "spec.containers.tools.args", ["y"]),
        (tools(args=None), "spec.containers.tools.args", None),
        (tools(env=[{"name": "A", "value": "2"}]), "spec.containers.tools.env.A.value", "2"),
        (tools(env=[{"name": "A", "value": "2"}]), "spec.containers.tools.env.HOME.value", "/tmp"),
        (tools(env=[{"name": "B", "value": "3"}]), "spec.containers.tools.env.B.value", "3"),
        (tools(env=[{"name": "A", "$patch": "delete"}]), "spec.containers.tools.env",
         [{"name": "HOME", "value": "/tmp"}]),
        (tools(env=[{"name": "Z", "$patch": "delete"}]), "spec.containers.tools.env.Z", None),
        (
            tools(ports=[{"containerPort": 7000, "hostPort": 7}]),
            "spec.containers.tools.ports.7000",
            {"name": "grpc", "containerPort": 7000, "hostPort": 7},
        ),
        (
            tools(volumeMounts=[{"mountPath": "/tmp", "subPath": "x"}]),
            "spec.containers.tools.volumeMounts",
            [{"name": "tmp", "mountPath": "/tmp", "subPath": "x"}],
        ),
        (tools(resources={"limits": {"memory": "1Gi"}}), "spec.containers.tools.resources.limits.memory", "1Gi"),
        (
            spec(containers=[{"name": "proxy", "image": "envoy"}]),
            "spec.containers.proxy",
            {"name": "proxy", "image": "envoy"},
        ),
        (spec(containers=[{"name": "proxy", "image": "envoy"}]), "spec.containers.tools.image", "r/tools:1"),
        (spec(initContainers=[{"name": "prepare", "$patch": "delete"}]), "spec.initContainers", []),
        (
            spec(volumes=[{"name": "home", "emptyDir": None, "persistentVolumeClaim": {"claimName": "c"}}]),
            "spec.volumes.home",
            {"name": "home", "persistentVolumeClaim": {"claimName": "c"}},
        ),
        ({"metadata": {"labels": {"team": "search"}}}, "metadata.labels.team", "search"),
    ],
)  # fmt: skip
def test_maps_are_merged_and_lists_by_the_keys_of_their_items(patch: dict[str, Any], path: str, found: Any) -> None:
    assert at(merged(patch), path) == found


def test_existing_items_stay_beside_patched_ones() -> None:
    made = merged({"metadata": {"labels": {"team": "search"}, "annotations": {"sidecar.istio.io/inject": "false"}}})
    assert made["metadata"] == {
        "labels": {"kestrl.dev/role": "tools", "team": "search"},
        "annotations": {"kestrl.dev/settings": "01", "sidecar.istio.io/inject": "false"},
    }


def test_items_keep_their_order_and_new_ones_come_last() -> None:
    made = merged(spec(volumes=[{"name": "new", "emptyDir": {}}, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]))
    assert [item["name"] for item in made["spec"]["volumes"]] == ["tmp", "home", "new"]


def test_an_item_that_is_replaced_keeps_its_place() -> None:
    made = merged(spec(volumes=[{"name": "tmp", "$patch": "delete"}, {"name": "tmp", "hostPath": {"path": "/x"}}]))
    assert made["spec"]["volumes"] == [{"name": "tmp", "hostPath": {"path": "/x"}}, {"name": "home", "emptyDir": {}}]


def test_a_patch_brings_no_token_of_the_account() -> None:
    token = [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
    with pytest.raises(
        UserInputError, match=r"^spec\.patches\[0\]\.template\.spec\.volumes: a pod of a job gets no token"
    ):
        merged(spec(volumes=token))


def test_later_patches_override_earlier_ones() -> None:
    made = merged(tools(image="two", args=["2"]), tools(image="three"))
    assert (at(made, "spec.containers.tools.image"), at(made, "spec.containers.tools.args")) == ("three", ["2"])


def test_the_given_template_is_not_modified() -> None:
    before = copy.deepcopy(TEMPLATE)
    merged(tools(image="two", env=[{"name": "A", "$patch": "delete"}]), {"metadata": {"labels": {"a": "b"}}})
    assert before == TEMPLATE


RESERVED = "is reserved for the operator; use another name"
NOT_CHANGEABLE = "cannot be changed by a job"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"containers": []}, ".containers: a pod template has metadata and spec, nothing else"),
        *((spec(**{field: "x"}), f".spec.{field}: {NOT_CHANGEABLE}; remove it") for field in RESERVED_FIELDS),
        (spec(serviceAccountName=None), f".spec.serviceAccountName: {NOT_CHANGEABLE}; remove it"),
        (spec(hostNetwork=False), f".spec.hostNetwork: {NOT_CHANGEABLE}; remove it"),
        ({"spec": None}, ".spec: must be a map"),
        ({"spec": []}, ".spec: must be a map"),
        ({"metadata": None}, ".metadata: must be a map"),
        ({"metadata": {"labels": None}}, ".metadata.labels: must be a map"),
        ({"metadata": {"annotations": None}}, ".metadata.annotations: must be a map"),
        ({"metadata": {"labels": "x"}}, ".metadata.labels: must be a map"),
        ({"metadata": {"name": "x"}}, f".metadata.name: {NOT_CHANGEABLE}; labels and annotations can"),
        ({"metadata": {"finalizers": ["x/y"]}}, f".metadata.finalizers: {NOT_CHANGEABLE}; labels and annotations can"),
        ({"metadata": {"labels": {"kestrl.dev/role": "learner"}}}, f".metadata.labels.kestrl.dev/role: {RESERVED}"),
        ({"metadata": {"labels": {"kestrl.dev/job": None}}}, f".metadata.labels.kestrl.dev/job: {RESERVED}"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/name": "kestrl-operator"}}},
            f".metadata.labels.app.kubernetes.io/name: {RESERVED}",
        ),
        (
            {"metadata": {"annotations": {"kestrl.dev/attempts": "0"}}},
            f".metadata.annotations.kestrl.dev/attempts: {RESERVED}",
        ),
        (spec(containers=["tools"]), ".spec.containers[0]: must be a map with name, the merge key"),
        (
            spec(containers=[{"name": "tools"}, {"image": "x"}]),
            ".spec.containers[1]: must be a map with name, the merge key",
        ),
        (
            tools(ports=[{"name": "grpc"}]),
            ".spec.containers[0].ports[0]: must be a map with containerPort, the merge key",
        ),
        (tools(env=[{"name": {"a": "b"}}]), ".spec.containers[0].env[0]: must be a map with name"),
        (tools(env=[{"name": "A", "$patch": "replace"}]), ".spec.containers[0].env[0].$patch: is not supported"),
        (spec(nodeSelector={"$patch": "replace"}), ".spec.nodeSelector.$patch: is not supported"),
        (spec(**{"$setElementOrder/containers": []}), ".spec.$setElementOrder/containers: is not supported"),
    ],
)  # fmt: skip
def test_a_reserved_field_is_refused_with_its_path(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        merged({}, patch)
    assert str(caught.value).startswith(f"spec.patches[1].template{message}")


NAMES = st.sampled_from(["a", "b", "image", "pool", "nodeSelector", "args"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["x", "y"]))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3),
        st.lists(st.sampled_from(["x", "y"]), max_size=2),
    ),
    max_leaves=4,
)


@st.composite
def items(draw: Any, key: str) -> dict[str, Any]:
    name = draw(st.sampled_from(["tools", "HOME", "A", "tmp", "/tmp", "new", 7000]))
    rest = draw(st.one_of(st.dictionaries(NAMES, VALUES, max_size=2), st.just({"$patch": "delete"})))
    return {**rest, key: name}


@st.composite
def anything(draw: Any) -> dict[str, Any]:
    """Any patch that a user may write."""
    inside: dict[str, Any] = draw(st.dictionaries(NAMES, VALUES, max_size=3))
    for field in draw(st.lists(st.sampled_from(sorted(MERGE_KEYS)), max_size=2, unique=True)):
        inside[field] = draw(st.lists(items(MERGE_KEYS[field]), max_size=3))
    if draw(st.booleans()):
        envs = draw(st.lists(items("name"), max_size=2))
        inside["containers"] = [{"name": draw(st.sampled_from(["tools", "new"])), "env": envs}]
    metadata = {"labels": draw(st.dictionaries(st.sampled_from(["team", "zone"]), st.sampled_from(["x", None])))}
    return {"spec": inside, "metadata": metadata}


@pytest.mark.parametrize("patch", [{}, {"spec": {}}, {"metadata": {}}, {"metadata": {"labels": {}, "annotations": {}}}])
def test_an_empty_patch_changes_nothing(patch: dict[str, Any]) -> None:
    assert merged(patch) == merged() == TEMPLATE


@given(anything())
def test_patching_twice_is_patching_once(patch: dict[str, Any]) -> None:
    once = merged(patch)
    assert merged(patch, base=once) == once


@given(anything(), anything())
def test_patches_one_after_another_are_the_same_as_together(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert merged(one, two) == merged(two, base=merged(one))


def holes(value: Any) -> bool:
    """Whether there is a null in a map, or a directive, anywhere outside of lists that are replaced as a whole."""
    if isinstance(value, dict):
        return any(item is None or name.startswith("$") or holes(item) for name, item in value.items())
    return isinstance(value, list) and any(holes(item) for item in value)


@given(anything())
def test_patch_directives_are_not_left_in_the_template(patch: dict[str, Any]) -> None:
    made = merged(patch)
    assert not holes(made)
    assert made["metadata"]["labels"]["kestrl.dev/role"] == "tools"
    assert made["spec"]["serviceAccountName"] == "email-search"


def without(*paths: str) -> dict[str, Any]:
    return patched(TEMPLATE, [PodPatch("spec.patches[0]", {}, paths)])


def test_fields_and_items_are_removed_by_their_paths() -> None:
    tools = without(
        "spec.containers[tools].args",
        "spec.containers[tools].env[A]",
        "spec.containers[tools].ports[7000]",
        "spec.containers[tools].volumeMounts[/tmp]",
        "spec.nodeSelector[pool]",
        "spec.tolerations",
        "spec.volumes[home]",
    )["spec"]
    assert tools["containers"] == [
        {
            "name": "tools",
            "image": "r/tools:1",
            "env": [{"name": "HOME", "value": "/tmp"}],
            "ports": [],
            "volumeMounts": [],
        }
    ]
    assert (tools["nodeSelector"], [item["name"] for item in tools["volumes"]]) == ({}, ["tmp"])
    assert "tolerations" not in tools


@pytest.mark.parametrize("path", ["spec.containers[other].args", "spec.affinity", "spec.containers[tools].env[B]"])
def test_what_is_not_there_need_not_be_removed(path: str) -> None:
    assert without(path) == TEMPLATE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec.serviceAccountName", "spec.serviceAccountName: cannot be changed by a job"),
        ("metadata.labels[kestrl.dev/role]", "is reserved for the operator"),
        ("metadata.annotations", "metadata.annotations: must be a map"),
        ("status.phase", "a pod template has metadata and spec"),
    ],
)
def test_what_a_job_must_not_change_cannot_be_removed(path: str, words: str) -> None:
    with pytest.raises(UserInputError, match=re.escape(words)) as caught:
        without(path)
    assert str(caught.value).startswith("spec.patches[0].remove[0]")
