"""Rendering: the objects of a job, the restrictions of its pods, and their connections."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.operator.rendering import ASCEND, NVIDIA, ROLES, SECRETS, VALUES, given, of_kind, rendered
from tests.unit.operator.samples import job

from kestrl._shared.credentials import held_by
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.prepare import PrepareSettings
from kestrl.errors import UserInputError
from kestrl.storage.credentials import FOLDER_VARIABLE
from kestrl_operator.render import render
from kestrl_operator.render.commands import INIT
from kestrl_operator.render.job import preparation
from kestrl_operator.render.resources import DEFAULTS
from kestrl_operator.render.volumes import STORAGE_SECRET
from kestrl_operator.state.parsing import workload_of

ROOT = Path(__file__).parents[4]


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return of_kind(objects, "StatefulSet", "Deployment")


def pod(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    return workloads(objects)[f"email-search-{role}"]["spec"]["template"]["spec"]


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in (*spec.get("initContainers", ()), *spec["containers"])}


def test_a_job_becomes_these_objects() -> None:
    objects = rendered()
    assert {(item["kind"], item["metadata"]["name"].removeprefix("email-search-")) for item in objects} == {
        *((kind, "agentrljob") for kind in ("Secret", "ConfigMap", "ServiceAccount")),
        *(("Service", role) for role in ROLES),
        ("StatefulSet", "inference"),
        ("StatefulSet", "learner"),
        *(("Deployment", role) for role in ("tools", "judge", "rollout")),
        *(("PodDisruptionBudget", role) for role in ("inference", "rollout")),
        *(("NetworkPolicy", name) for name in ("all", *ROLES)),
    }


def test_objects_come_before_the_pods_that_need_them_and_the_learner_last() -> None:
    """Whether all objects were applied is read from the learner's StatefulSet alone."""
    kinds = [item["kind"] for item in rendered()]
    first = {kind: kinds.index(kind) for kind in kinds}
    last = {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
    before = ("Secret", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Service", "PodDisruptionBudget")
    assert max(last[kind] for kind in before) < min(first["StatefulSet"], first["Deployment"])
    assert [item["metadata"]["name"].removeprefix("email-search-") for item in rendered()[-5:]] == list(ROLES)


def test_pods_called_by_name_are_of_parallel_stateful_sets() -> None:
    for name, item in workloads(rendered()).items():
        stateful = name.endswith(("inference", "learner"))
        assert item["kind"] == ("StatefulSet" if stateful else "Deployment")
        assert item["spec"].get("serviceName") == (name if stateful else None)
        assert item["spec"].get("podManagementPolicy") == ("Parallel" if stateful else None)


def test_the_learners_state_outlives_its_pods_and_not_the_job() -> None:
    claimed = {
        name: item["spec"] for name, item in workloads(rendered()).items() if "volumeClaimTemplates" in item["spec"]
    }
    assert set(claimed) == {"email-search-learner"}
    kept = claimed["email-search-learner"]["persistentVolumeClaimRetentionPolicy"]
    assert kept == {"whenDeleted": "Delete", "whenScaled": "Retain"}


def test_a_drained_node_takes_one_pod_of_a_role_at_a_time() -> None:
    for name, item in of_kind(rendered(), "PodDisruptionBudget").items():
        assert item["spec"]["maxUnavailable"] == 1
        assert item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "one that crashes does not hold a node"
        assert item["spec"]["selector"] == workloads(rendered())[name]["spec"]["selector"]


def test_no_probe_ends_before_a_busy_node_answers() -> None:
    probes = {
        (name, probe): container[probe]["timeoutSeconds"]
        for workload in workloads(rendered()).values()
        for name, container in containers(workload["spec"]["template"]["spec"]).items()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        if probe in container
    }
    assert {name for name, _ in probes} >= {"engine", "inference", "rollout", "tools", "judge", "learner"}
    assert min(probes.values()) >= 5


def test_pods_have_an_account_without_a_token() -> None:
    objects = rendered()
    (account,) = of_kind(objects, "ServiceAccount").values()
    assert (account["metadata"]["name"], account["automountServiceAccountToken"]) == (
        "email-search-agentrljob",
        False,
    )
    assert {pod(objects, role)["serviceAccountName"] for role in ROLES} == {"email-search-agentrljob"}


def test_the_learners_annotations_hold_the_operators_state() -> None:
    objects = rendered(attempts=2, restarts=1)
    marks = objects[-1]["metadata"]["annotations"]
    assert (marks["kestrl.dev/attempts"], marks["kestrl.dev/restarts"]) == ("2", "1")
    found = workload_of(objects[-1])
    assert found is not None
    assert (found.role, found.count("kestrl.dev/attempts"), found.count("kestrl.dev/restarts")) == ("learner", 2, 1)
    assert [item["metadata"]["name"] for item in objects if "annotations" in item["metadata"]] == [
        "email-search-learner"
    ]


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ((), {"parked": True}),
        ((), {"attempts": 1}),
        ((), {"restarts": 1}),
        ((), {"queue": "gpus"}),
        ((), {"store": "s3"}),
        ((), {"secrets": {**SECRETS, "KESTRL_LEARNER_TO_ROLLOUT_TOKEN": "another"}}),
        (("rollout.replicas=3",), {}),
        (("patches=[{role: judge, template: {spec: {nodeSelector: {a: b}}}}]",), {}),
    ],
)
def test_every_change_changes_the_digest(overrides: tuple[str, ...], changes: dict[str, Any]) -> None:
    def digest(objects: list[dict[str, Any]]) -> str:
        return str(objects[-1]["metadata"]["annotations"]["kestrl.dev/rendered"])

    assert digest(rendered()) == digest(rendered())
    assert digest(rendered()) != digest(rendered(*overrides, **changes))


@pytest.mark.parametrize(
    ("changes", "rolled"),
    [({"attempts": 1}, {"learner"}), ({"restarts": 1}, set(ROLES)), ({"parked": True}, set()), ({"queue": "q"}, set())],
)
def test_another_attempt_rolls_the_learner_and_another_start_all_pods(
    changes: dict[str, Any], rolled: set[str]
) -> None:
    before, after = workloads(rendered()), workloads(rendered(**changes))
    assert {
        name.removeprefix("email-search-")
        for name in before
        if before[name]["spec"]["template"] != after[name]["spec"]["template"]
    } == rolled


def test_with_a_range_of_engines_their_number_is_not_applied() -> None:
    fixed, moved = rendered("inference.replicas=2"), rendered("inference.replicas={min: 2, max: 5}")
    for objects in (fixed, moved):
        del objects[-1]["metadata"]["annotations"]["kestrl.dev/rendered"]
    assert "replicas" not in workloads(moved)["email-search-inference"]["spec"]
    assert workloads(fixed)["email-search-inference"]["spec"].pop("replicas") == 2
    assert moved == fixed
    parked = workloads(rendered("inference.replicas={min: 2, max: 5}", parked=True))
    assert {item["spec"]["replicas"] for item in parked.values()} == {0}


def test_pods_wait_in_the_jobs_queue() -> None:
    for item in workloads(rendered(queue="gpus")).values():
        assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert "kueue.x-k8s.io/queue-name" not in item["spec"]["template"]["metadata"]["labels"]
        assert "kueue.x-k8s.io/queue-name" not in item["spec"]["selector"]["matchLabels"]
    assert "kueue.x-k8s.io" not in json.dumps(rendered())


def test_every_container_requests_its_configured_resources_and_devices() -> None:
    asked = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    objects = rendered(*NVIDIA, values={"resources": {"engine": asked, "judge": {"limits": {"memory": "1Gi"}}}})
    parts = containers(pod(objects, "inference"))
    assert parts["engine"]["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    assert parts["inference"]["resources"] == {"requests": DEFAULTS["inference"]}
    judge = containers(pod(objects, "judge"))["judge"]["resources"]
    assert judge == {"requests": {"cpu": DEFAULTS["judge"]["cpu"]}, "limits": {"memory": "1Gi"}}
    assert containers(pod(objects, "learner"))["learner"]["resources"] == {
        "requests": {**DEFAULTS["learner"], "nvidia.com/gpu": "1"},
        "limits": {"nvidia.com/gpu": "1"},
    }


LIMITS = {"cpu": "2", "memory": "1Gi"}


@pytest.mark.parametrize("values", [{}, {"resources": {name: {"limits": LIMITS} for name in DEFAULTS}}])
def test_a_namespace_with_a_compute_quota_takes_every_container(values: dict[str, Any]) -> None:
    """A quota on requests refuses a pod of which a container has none, and one on limits likewise; Kubernetes takes a
    limit for a request that is missing."""
    for workload in workloads(rendered("learner.replicas=2", values=values)).values():
        spec = workload["spec"]["template"]["spec"]
        for item in [*spec["containers"], *spec.get("initContainers", ())]:
            resources = item["resources"]
            assert {**resources.get("limits", {}), **resources.get("requests", {})}.keys() >= {"cpu", "memory"}
            if values:
                assert resources["limits"] == LIMITS, item["name"]


def test_a_patch_with_a_low_limit_lowers_a_default_request() -> None:
    patch = "{role: judge, template: {spec: {containers: [{name: judge, resources: {limits: {memory: 64Mi}}}]}}}"
    judge = containers(pod(rendered(f"patches=[{patch}]"), "judge"))["judge"]["resources"]
    assert judge == {"requests": {**DEFAULTS["judge"], "memory": "64Mi"}, "limits": {"memory": "64Mi"}}


def test_patches_are_merged_onto_the_pods_of_their_role_alone() -> None:
    patch = (
        "{role: inference, template: {metadata: {labels: {team: search}}, spec: {priorityClassName: high,"
        " containers: [{name: engine, resources: {limits: {memory: 40Gi}}}]}}}"
    )
    plain = rendered(*NVIDIA)
    changed = rendered(*NVIDIA, f"patches=[{patch}]")
    template = workloads(changed)["email-search-inference"]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "search"
    assert template["metadata"]["labels"]["kestrl.dev/role"] == "inference"
    assert template["spec"]["priorityClassName"] == "high"
    engine = containers(template["spec"])["engine"]
    assert engine["resources"]["limits"] == {"memory": "40Gi", "nvidia.com/gpu": "2"}
    assert engine["image"] == "vllm/vllm-openai:v0.32.0"
    for role in ("tools", "judge", "rollout", "learner"):
        assert pod(changed, role) == pod(plain, role)


def test_a_later_patch_wins_and_errors_name_its_index() -> None:
    one = "{role: tools, template: {spec: {nodeSelector: {pool: a, zone: x}}}}"
    two = "{role: tools, template: {spec: {nodeSelector: {pool: b}}}}"
    assert pod(rendered(f"patches=[{one}, {two}]"), "tools")["nodeSelector"] == {"pool": "b", "zone": "x"}
    bad = "{role: judge, template: {spec: {hostNetwork: true}}}"
    with pytest.raises(UserInputError, match=r"^spec\.patches\[1\]\.template\.spec\.hostNetwork: cannot be changed"):
        rendered(f"patches=[{one}, {bad}]")


def test_claims_in_addresses_are_mounted_where_they_are_read() -> None:
    objects = rendered("model.base=pvc://models/qwen", "data.train.uri=pvc://sets/train.jsonl", "data.validation=null")
    mounted = {
        role: {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod(objects, role)["volumes"]
            if "persistentVolumeClaim" in volume
        }
        for role in ROLES
    }
    assert mounted == {
        "inference": {"models"},
        "rollout": {"models"},
        "learner": {"models", "sets"},
        "tools": {"sets"},
        "judge": set(),
    }
    for role, claims in mounted.items():
        for held in containers(pod(objects, role)).values():
            paths = {mount["mountPath"]: mount.get("readOnly") for mount in held["volumeMounts"]}
            assert {f"/kestrl/pvc/{claim}": True for claim in claims}.items() <= paths.items()


def test_every_object_is_owned_by_the_job_and_blocks_no_deletion() -> None:
    for item in rendered():
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "AgentRLJob",
            "email-search",
            "u-1",
            True,
        )
        assert owner["blockOwnerDeletion"] is False
        assert item["metadata"]["namespace"] == "team-a"
        assert item["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kestrl-operator"


def test_rendering_is_a_pure_function() -> None:
    assert json.dumps(rendered()) == json.dumps(rendered())


@pytest.mark.parametrize("overrides", [(), NVIDIA, ASCEND], ids=["cpu", "nvidia", "ascend"])
def test_every_pod_passes_pod_security_restricted(overrides: tuple[str, ...]) -> None:
    objects = rendered(*overrides)
    for name, item in workloads(objects).items():
        spec = item["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        allowed = {"configMap", "emptyDir"} | (
            {"hostPath"} if overrides == ASCEND and name.endswith(("inference", "learner")) else set()
        )
        for volume in spec["volumes"]:
            assert (set(volume) - {"name"}) <= allowed, name
        for held in containers(spec).values():
            security = held["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_every_mount_has_its_volume_and_every_settings_file_exists() -> None:
    objects = rendered(*ASCEND)
    files = of_kind(objects, "ConfigMap")["email-search-agentrljob"]["data"]
    for item in workloads(objects).values():
        spec = item["spec"]["template"]["spec"]
        known = {volume["name"] for volume in spec["volumes"]}
        known |= {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", ())}
        for held in containers(spec).values():
            assert {mount["name"] for mount in held["volumeMounts"]} <= known
            paths = [argument for argument in (*held["command"], *held.get("args", ())) if argument.endswith(".json")]
            for path in paths:
                for index in ("0", "1"):
                    assert path.removeprefix("/kestrl/settings/").replace("$(KESTRL_INDEX)", index) in files


def test_an_engine_and_its_agent_share_a_pod_and_only_the_engine_has_devices() -> None:
    parts = containers(pod(rendered(*NVIDIA), "inference"))
    assert list(parts) == ["prepare", "engine", "inference"]
    assert parts["engine"]["image"] == "vllm/vllm-openai:v0.32.0"
    assert parts["engine"]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "limits" not in parts["inference"]["resources"]
    visible = {name: {item["name"]: item.get("value") for item in held["env"]} for name, held in parts.items()}
    assert visible["inference"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "NVIDIA_VISIBLE_DEVICES" not in visible["engine"]
    work = [
        mount["mountPath"]
        for name in ("engine", "inference")
        for mount in parts[name]["volumeMounts"]
        if mount["name"] == "work"
    ]
    assert work == ["/kestrl/work", "/kestrl/work"]


def test_credentials_are_references_and_each_has_only_its_own() -> None:
    objects = rendered()
    for item in workloads(objects).values():
        for held in containers(item["spec"]["template"]["spec"]).values():
            for variable in held.get("env", ()):
                if variable["name"] in SECRETS:
                    assert variable["valueFrom"]["secretKeyRef"] == {
                        "name": "email-search-agentrljob",
                        "key": variable["name"],
                    }
    seen = {
        name: {variable["name"] for variable in held["env"] if "secretKeyRef" in variable.get("valueFrom", {})}
        for role in ROLES
        for name, held in containers(pod(objects, role)).items()
        if name != "prepare"
    }
    assert seen == {role: {secret.value for secret in held_by(role)} for role in (*ROLES, "engine")}
    assert seen["tools"] == {"KESTRL_ROLLOUT_TO_TOOLS_TOKEN"}
    assert seen["judge"] == {"KESTRL_ROLLOUT_TO_JUDGE_TOKEN"}
    assert not [
        kind
        for pods in workloads(objects).values()
        for kind in pods["spec"]["template"]["spec"]["volumes"]
        if "secret" in kind
    ]
    elsewhere = json.dumps([item for item in objects if item["kind"] != "Secret"])
    assert not [name for name, value in SECRETS.items() if value in elsewhere]


def test_credentials_are_not_in_what_is_printed() -> None:
    assert not [name for name, value in SECRETS.items() if value in repr(given())]


def test_storage_credentials_are_only_in_pods_that_use_storage() -> None:
    objects = rendered(store="s3")
    held_by = {
        (role, name)
        for role in ROLES
        for name, held in containers(pod(objects, role)).items()
        if held.get("envFrom") == [{"secretRef": {"name": "s3"}}]
    }
    assert held_by == {(role, "prepare") for role in ("inference", "rollout", "learner")}, "variables stay as they are"
    mounted = {"name": "storage-secret", "mountPath": STORAGE_SECRET, "readOnly": True}
    readers = {
        (role, name)
        for role in ROLES
        for name, held in containers(pod(objects, role)).items()
        if mounted in held["volumeMounts"]
    }
    assert readers == {("learner", "learner"), ("inference", "inference")}, "a changed Secret reaches them"
    for role in ("learner", "inference"):
        assert {"name": FOLDER_VARIABLE, "value": STORAGE_SECRET} in containers(pod(objects, role))[role]["env"]
        (volume,) = [item for item in pod(objects, role)["volumes"] if item["name"] == "storage-secret"]
        assert volume["secret"] == {"secretName": "s3", "optional": True, "defaultMode": 0o440}
    assert "envFrom" not in json.dumps(rendered())
    assert "storage-secret" not in json.dumps(rendered())


def test_tools_prepare_nothing_that_they_cannot_reach() -> None:
    def prepared(*overrides: str) -> list[str]:
        return [item.uri for item in preparation(job(*overrides), Role.TOOLS).data]

    stored = "data.train={uri: 's3://bucket/train.jsonl'}"
    assert prepared() == ["demo://email/train", "demo://email/validation"]
    assert prepared(stored) == ["demo://email/validation"]
    assert prepared("data.train={uri: 'pvc://sets/train.jsonl'}", "data.validation=null") == ["pvc://sets/train.jsonl"]
    learner = preparation(job(stored), Role.LEARNER)
    assert [item.uri for item in learner.data] == ["s3://bucket/train.jsonl", "demo://email/validation"]


def test_changed_settings_roll_the_pods_that_read_them_and_no_others() -> None:
    def stamps(*overrides: str) -> dict[str, str]:
        return {
            name.removeprefix("email-search-"): item["spec"]["template"]["metadata"]["annotations"][
                "kestrl.dev/settings"
            ]
            for name, item in workloads(rendered(*overrides)).items()
        }

    before = stamps()
    longer = stamps("schedule.maxSteps=99")
    assert {role for role in before if before[role] != longer[role]} == {"learner"}
    slower = stamps("rewards=[{rule: 'kestrl_email.rewards:art_e', timeout: 99s}]")
    assert {role for role in before if before[role] != slower[role]} == {"judge", "learner"}


@pytest.mark.parametrize("role", ["rollout", "inference"])
def test_scaling_changes_a_number_and_nothing_else(role: str) -> None:
    """Engines and workers are found by their Services, by a judge that asks the job's engines, too."""
    ruler = "rewards=[{ruler: {self: true}}]"
    few, many = rendered(ruler, f"{role}.replicas=2"), rendered(ruler, f"{role}.replicas=5")
    scaled = [workloads(objects)[f"email-search-{role}"]["spec"].pop("replicas") for objects in (few, many)]
    digests = {objects[-1]["metadata"]["annotations"].pop("kestrl.dev/rendered") for objects in (few, many)}
    assert scaled == [2, 5]
    assert len(digests) == 2, "the change is applied"
    assert few == many


def test_other_credentials_roll_every_pod() -> None:
    """A running pod keeps its variables, so pods with new credentials would refuse those with old ones."""
    before = workloads(rendered())
    after = workloads(rendered(secrets={**SECRETS, "KESTRL_LEARNER_TO_ROLLOUT_TOKEN": "another"}))
    assert all(before[name]["spec"]["template"] != after[name]["spec"]["template"] for name in before)


def test_the_storage_of_a_run_is_recorded_beside_its_state() -> None:
    kept = [
        item["metadata"]["annotations"] for item in rendered(storage="s3://b/x") if "annotations" in item["metadata"]
    ]
    assert [item["kestrl.dev/storage"] for item in kept] == ["s3://b/x"]


@pytest.mark.parametrize(("overrides", "seconds"), [((), 180), (("learner.terminationGrace=10m",), 600)])
def test_a_job_says_how_long_its_learner_may_take_to_end(overrides: tuple[str, ...], seconds: int) -> None:
    made = given(*overrides)
    assert pod(render(made), "learner")["terminationGracePeriodSeconds"] == seconds
    (learner,) = made.of(Role.LEARNER)
    assert isinstance(learner.settings, LearnerSettings)
    assert learner.settings.grace_seconds <= seconds
    others = {role: pod(render(made), role)["terminationGracePeriodSeconds"] for role in ROLES[:-1]}
    assert others == {"inference": 90, "tools": 30, "judge": 30, "rollout": 90}


@pytest.mark.parametrize(("deadline", "seconds"), [("2m", 150), ("45.5s", 76)])
def test_an_engine_outlives_the_turns_that_it_answers(deadline: str, seconds: int) -> None:
    made = given(f"rollout.deadlines.turn={deadline}", "rollout.deadlines.tool=10s", "rollout.deadlines.episode=1h")
    engine, agent = (template := pod(render(made), "inference"))["containers"]
    assert template["terminationGracePeriodSeconds"] == seconds
    limit = engine["lifecycle"]["preStop"]["exec"]["command"][-1]
    port = str(engine["ports"][0]["containerPort"])
    assert engine["lifecycle"] == {
        "preStop": {"exec": {"command": ["python", "-m", "kestrl_inference.inside.drain", port, limit]}}
    }
    assert "lifecycle" not in agent, "it gets its SIGTERM at once, and says that its engine drains"
    (settings,) = [component.settings for component in made.of(Role.INFERENCE)[:1]]
    assert isinstance(settings, AgentSettings)
    assert settings.drain_seconds == float(limit) <= seconds - 30
    others = [container for role in ROLES[1:] for container in pod(render(made), role)["containers"]]
    assert not [container for container in others if "lifecycle" in container]


def test_a_parked_job_keeps_its_objects_and_runs_nothing() -> None:
    objects = rendered(parked=True)
    assert {item["spec"]["replicas"] for item in workloads(objects).values()} == {0}
    assert len(objects) == len(rendered())


def test_pods_prepare_what_they_need() -> None:
    files = of_kind(rendered(), "ConfigMap")["email-search-agentrljob"]["data"]
    needs = {
        name: PrepareSettings.model_validate_json(text) for name, text in files.items() if name.startswith("prepare-")
    }
    assert needs["prepare-inference.json"].model == "demo://tiny"
    assert needs["prepare-inference.json"].data == ()
    assert {name for name, need in needs.items() if need.model and not need.model_weights} == {"prepare-rollout.json"}
    assert needs["prepare-tools.json"].model is None
    assert [item.target for item in needs["prepare-tools.json"].data] == [
        "/kestrl/data/train.jsonl",
        "/kestrl/data/validation.jsonl",
    ]
    assert needs["prepare-learner.json"].data == needs["prepare-tools.json"].data
    assert {item.data_dir for item in needs.values()} == {"/kestrl/data"}
    assert {item.template for item in needs.values()} == {None}


def test_a_chat_template_is_prepared_in_the_pods_that_render_prompts() -> None:
    own = job("agent.template={uri: 's3://bucket/chat.jinja'}")
    needs = {role: preparation(own, role) for role in Role}
    assert {role for role, need in needs.items() if need.template == "s3://bucket/chat.jinja"} == {Role.ROLLOUT}
    assert needs[Role.ROLLOUT].template_target == "/kestrl/data/template.jinja"


ISOLATED = "tools=[{use: 'shop:Shop'}, {use: 'a:b', sandbox: {runtimeClassName: gvisor}}]"


def test_the_tool_pod_alone_has_the_runtime_class_of_the_tools() -> None:
    objects = rendered(ISOLATED)
    assert {role: pod(objects, role).get("runtimeClassName") for role in ROLES} == {
        **dict.fromkeys(ROLES),
        "tools": "gvisor",
    }
    assert pod(rendered(ISOLATED, values={"toolsRuntimeClass": "gvisor"}), "tools")["runtimeClassName"] == "gvisor"


def test_a_job_cannot_leave_the_runtime_class_of_the_cluster() -> None:
    with pytest.raises(UserInputError, match=r"^spec.tools\[1\].sandbox.runtimeClassName: is gvisor, .* under kata"):
        rendered(ISOLATED, values={"toolsRuntimeClass": "kata"})


def test_the_administrators_choices_are_in_the_pods() -> None:
    values = {
        "toolsRuntimeClass": "gvisor",
        "networkPolicies": False,
        "learnerState": {"size": "5Gi", "storageClass": "fast"},
        "images": {**VALUES["images"], "pullSecrets": ["registry"], "pullPolicy": "Never"},
        "accelerators": {"nvidia": {"runtimeClass": "nvidia", "nodeSelector": {"pool": "a100"}}},
    }
    objects = rendered(*NVIDIA, values=values)
    assert pod(objects, "tools")["runtimeClassName"] == "gvisor"
    assert pod(objects, "inference")["runtimeClassName"] == "nvidia"
    assert pod(objects, "inference")["nodeSelector"] == {"pool": "a100"}
    assert pod(objects, "inference")["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert "tolerations" not in pod(objects, "rollout")
    assert pod(objects, "judge")["imagePullSecrets"] == [{"name": "registry"}]
    assert containers(pod(objects, "judge"))["judge"]["imagePullPolicy"] == "Never"
    (claim,) = workloads(objects)["email-search-learner"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    assert of_kind(objects, "NetworkPolicy") == {}


POD_DEFAULTS: dict[str, Any] = {
    "labels": {"team": "rl"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "nodeSelector": {"zone": "a", "pool": "any"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "priorityClassName": "research",
    "env": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "HOME", "value": "/elsewhere"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}, "containers": ["prepare"]},
    ],
}


def test_pod_defaults_are_in_the_pods_of_every_job_and_replace_nothing_of_their_own() -> None:
    values = {"podDefaults": POD_DEFAULTS, "accelerators": {"nvidia": {"nodeSelector": {"pool": "a100"}}}}
    plain, objects = rendered(*NVIDIA), rendered(*NVIDIA, values=values)
    for name, workload in workloads(objects).items():
        template, before = workload["spec"]["template"], workloads(plain)[name]["spec"]["template"]
        assert template["metadata"]["labels"] == {"team": "rl", **before["metadata"]["labels"]}
        assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        assert workload["spec"]["selector"] == workloads(plain)[name]["spec"]["selector"]
        spec = template["spec"]
        assert spec["priorityClassName"] == "research"
        assert spec["tolerations"][-1] == {"key": "dedicated", "operator": "Exists"}
        assert spec["nodeSelector"]["zone"] == "a"
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            variables = {entry["name"]: entry for entry in container["env"]}
            assert len(variables) == len(container["env"])
            assert variables["HTTPS_PROXY"]["value"] == "http://proxy:3128"
            assert variables["HOME"]["value"] != "/elsewhere"
            assert ("HF_TOKEN" in variables) is (container["name"] == "prepare")
    assert pod(objects, "inference")["nodeSelector"]["pool"] == "a100"
    assert [item["key"] for item in pod(objects, "inference")["tolerations"]] == ["nvidia.com/gpu", "dedicated"]


def test_the_documented_values_give_every_container_that_sends_spans_the_key_of_its_collector() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/install.md").read_text(), re.MULTILINE | re.DOTALL)
    (documented,) = [yaml.safe_load(block) for block in blocks if "OTEL_EXPORTER_OTLP_HEADERS" in block]
    (variable,) = documented["operator"]["extraEnv"]
    templates = [item["spec"]["template"]["spec"] for item in workloads(rendered(values=documented["jobs"])).values()]
    containers = [item for spec in templates for item in (*spec["containers"], *spec.get("initContainers", []))]
    assert {item["name"] for item in containers if variable in item["env"]} == {
        "engine", "inference", "rollout", "learner",
    }  # fmt: skip


def test_a_patch_of_a_job_comes_after_the_pod_defaults() -> None:
    patch = "patches=[{role: judge, template: {spec: {priorityClassName: urgent}}}]"
    objects = rendered(patch, values={"podDefaults": POD_DEFAULTS})
    assert pod(objects, "judge")["priorityClassName"] == "urgent"
    assert pod(objects, "rollout")["priorityClassName"] == "research"


@pytest.mark.parametrize(
    ("defaults", "problem"),
    [
        ({"labels": {"kestrl.dev/job": "x"}}, r"podDefaults.labels: .*kestrl.dev/job belongs to the operator"),
        ({"env": [{"name": "A"}]}, r"podDefaults.env.0: .*give either value or valueFrom"),
        ({"env": [{"name": "A", "value": "1", "containers": ["all"]}]}, r"podDefaults.env.0.containers.0"),
        ({"affinity": {}}, r"podDefaults.affinity: Extra inputs"),
    ],
)
def test_invalid_pod_defaults_are_refused_by_field(defaults: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserInputError, match=problem):
        rendered(values={"podDefaults": defaults})


def test_a_profile_of_the_chart_is_rendered_like_a_built_in_one() -> None:
    values = {
        "accelerators": {"mig": {"resource": "nvidia.com/mig-1g.10gb", "image": "cuda", "labels": {"pool": "mig"}}}
    }
    objects = rendered("inference.accelerator={profile: mig, count: 3}", values=values)
    engine = containers(pod(objects, "inference"))["engine"]
    assert engine["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "3"}
    assert engine["command"] == [*INIT, "python", "-m", "kestrl_inference.inside.launcher"]
    template = workloads(objects)["email-search-inference"]["spec"]["template"]
    assert template["metadata"]["labels"]["pool"] == "mig"


def test_a_job_with_sglang_gets_its_image_its_launcher_and_its_routes() -> None:
    objects = rendered(*NVIDIA, "inference.engine=sglang", "inference.version='0.5'")
    engine = containers(pod(objects, "inference"))["engine"]
    assert engine["image"] == "r/sglang-cuda:1"
    assert engine["command"] == [*INIT, "python", "-m", "kestrl_inference.inside.sglang_launcher"]
    assert engine["args"][:4] == ["--guard", "--version", "0.5", "--"]
    assert engine["args"][engine["args"].index("--tp-size") + 1] == "2"
    environment = {item["name"]: item.get("value") for item in engine["env"]}
    assert ["POST", "/generate"] in json.loads(environment["KESTRL_ENGINE_ROUTES"] or "")["data"]


def test_an_engine_is_started_by_the_interpreter_of_its_image() -> None:
    named = rendered("inference.python=/opt/vllm/bin/python", "inference.version='0.30'")
    engine = containers(pod(named, "inference"))["engine"]
    assert engine["command"] == [*INIT, "/opt/vllm/bin/python", "-m", "kestrl_inference.inside.launcher"]
    assert engine["args"][engine["args"].index("--version") + 1] == "0.30"
    assert "PYTHONPATH" not in {item["name"] for item in engine["env"]}
