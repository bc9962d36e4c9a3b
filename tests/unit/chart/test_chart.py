"""The chart as an administrator meets it: what an install makes, what each value changes, and what is refused."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrl._shared.telemetry.names import Instrument, Metric
from kestrl_operator.config import read_config
from kestrl_operator.preflight import needed
from kestrl_operator.render.network import OPERATOR
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.status import conditions

from .conftest import CHART, PROMETHEUS, Helm, Rendered

pytestmark = pytest.mark.helm
NAME = "kestrl-operator"
MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def pod(objects: Rendered) -> dict[str, Any]:
    return objects.one("Deployment")["spec"]["template"]


def config(objects: Rendered, folder: Path) -> Any:
    (folder / "operator.yaml").write_text(objects.of("ConfigMap")[config_name(objects)]["data"]["operator.yaml"])
    return read_config(folder / "operator.yaml")


def config_name(objects: Rendered) -> str:
    """The ConfigMap that the operator's pods mount."""
    volumes = {volume["name"]: volume for volume in pod(objects)["spec"]["volumes"]}
    name: str = volumes["config"]["configMap"]["name"]
    return name


DEFINITIONS = ["agentrljobs.kestrl.dev", "sftjobs.kestrl.dev"]


def test_it_passes_helm_s_own_lint(helm: Helm) -> None:
    ended = helm.run("lint", "--strict", str(CHART))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_an_install_makes_these_objects(helm: Helm) -> None:
    objects = helm.render()
    made = sorted((item["kind"], item["metadata"]["name"]) for item in objects)
    assert made == sorted(
        [
            *(("CustomResourceDefinition", name) for name in DEFINITIONS),
            ("Deployment", NAME),
            ("ServiceAccount", NAME),
            ("ConfigMap", config_name(objects)),
            ("Secret", f"{NAME}-key"),
            ("Service", NAME),
            ("NetworkPolicy", NAME),
            ("PodDisruptionBudget", NAME),
            ("Role", f"{NAME}-lease"),
            ("RoleBinding", f"{NAME}-lease"),
            *(
                (kind, f"{NAME}{part}")
                for kind in ("ClusterRole", "ClusterRoleBinding")
                for part in ("", "-nodes", "-definition", "-leases")
            ),
            ("ClusterRole", f"{NAME}-jobs-view"),
            ("ClusterRole", f"{NAME}-jobs-edit"),
            *((kind, "kestrl-test") for kind in ("ServiceAccount", "ConfigMap", "Role", "RoleBinding", "Pod")),
        ]
    )  # fmt: skip


def test_every_object_says_whose_it_is_and_namespaced_ones_where(helm: Helm) -> None:
    for item in helm.render(None, *PROMETHEUS):
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "kestrl"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        clusterwide = item["kind"].startswith(("ClusterRole", "CustomResource"))
        assert item["metadata"].get("namespace") == (None if clusterwide else "kestrl-system"), item["kind"]


def test_the_operator_reads_its_settings(helm: Helm, tmp_path: Path) -> None:
    read = config(
        helm.render({"namespaces": ["a", "b"], "operator": {"otlp": "http://c:4317", "auditSeconds": 90}}), tmp_path
    )
    assert read.jobs == read_cluster(yaml.safe_load((CHART / "values.yaml").read_text())["jobs"])
    assert read.namespaces == ("a", "b")
    assert (read.lease.name, read.lease.namespace, read.lease.seconds) == (NAME, "kestrl-system", 15)
    assert (read.health_listen, read.metrics_listen) == ("0.0.0.0:8080", "0.0.0.0:9464")
    assert (read.otlp, read.workers, read.audit_seconds) == ("http://c:4317", 8, 90)


def test_an_administrators_choice_reaches_the_operator(helm: Helm, tmp_path: Path) -> None:
    jobs = {
        "storage": {"uri": "s3://b/p", "secret": "s3"},
        "accelerators": {"nvidia": {"nodeSelector": {"pool": "a100"}}},
        "toolsRuntimeClass": "gvisor",
        "resources": {"learner": {"requests": {"cpu": 2}}},
    }
    read = config(helm.render({"jobs": jobs}), tmp_path).jobs
    assert (read.storage.uri, read.storage.secret, read.tools_runtime_class) == ("s3://b/p", "s3", "gvisor")
    assert read.profile("nvidia").node_selector == {"pool": "a100"}
    assert read.resources["learner"] == {"requests": {"cpu": 2}}


def test_where_the_settings_say_it_listens_and_reads_the_pod_has_it(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render()
    read, spec = config(objects, tmp_path), pod(objects)["spec"]
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {f"0.0.0.0:{port}" for port in ports.values()} == {read.health_listen, read.metrics_listen}
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {ports[probe["port"]] for probe in probes.values()} == {8080}
    assert min(container[f"{kind}Probe"]["timeoutSeconds"] for kind in probes) == 5, "a busy node answers late"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounts.keys() == {"/etc/kestrl", "/etc/kestrl-key", "/tmp"}
    assert str(read.key_file) == "/etc/kestrl-key/key"
    assert volumes[mounts["/etc/kestrl-key"]]["secret"]["secretName"] == f"{NAME}-key"
    names = {item["name"] for item in container["env"]}
    assert names == {"POD_NAME", "POD_NAMESPACE", "KESTRL_LOG_LEVEL", "KESTRL_LOG_FORMAT"}


def test_a_busy_or_broken_operator_holds_neither_its_probes_nor_a_drain(helm: Helm) -> None:
    objects = helm.render()
    (container,) = pod(objects)["spec"]["containers"]
    assert all(container[f"{kind}Probe"]["timeoutSeconds"] >= 5 for kind in ("startup", "readiness", "liveness"))
    assert objects.one("PodDisruptionBudget")["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_change_of_the_settings_rolls_the_operator_and_nothing_else_does(helm: Helm) -> None:
    """Pods of the template before mount the settings before."""

    def mounted(values: dict[str, Any]) -> str:
        objects = helm.render(values)
        name = config_name(objects)
        assert name.startswith(f"{NAME}-")
        assert objects.of("ConfigMap")[name]["immutable"]
        return name

    assert mounted({}) == mounted({"operator": {"replicas": 3, "podAnnotations": {"team": "blue"}}})
    assert mounted({}) != mounted({"jobs": {"toolsRuntimeClass": "gvisor"}})


def test_no_label_of_a_user_hides_the_operator_from_the_jobs_policies(helm: Helm) -> None:
    mine = {"app.kubernetes.io/name": "mine", "team": "blue"}
    objects = helm.render({"nameOverride": "other", "operator": {"podLabels": mine}})
    labels = pod(objects)["metadata"]["labels"]
    assert OPERATOR.items() <= labels.items()
    assert labels["team"] == "blue"
    assert "app.kubernetes.io/part-of" not in labels, "the PodMonitor of jobs would scrape the operator too"
    for selector in (
        objects.one("Deployment")["spec"]["selector"]["matchLabels"],
        objects.one("Service")["spec"]["selector"],
        objects.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        objects.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert not selector.items() <= objects.one("Pod")["metadata"]["labels"].items(), (
        "the test's pod is not the operator's"
    )


# The key


def test_the_key_is_random_kept_and_long_enough(helm: Helm) -> None:
    one, other = (helm.render().of("Secret")[f"{NAME}-key"] for _ in range(2))
    assert one["data"]["key"] != other["data"]["key"]
    assert len(one["data"]["key"]) >= 43 * 4 / 3
    assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_key_of_ones_own_is_used_and_none_is_made(helm: Helm) -> None:
    objects = helm.render({"operator": {"existingKeySecret": "mine"}})
    assert objects.of("Secret") == {}
    (volume,) = (volume for volume in pod(objects)["spec"]["volumes"] if volume["name"] == "key")
    assert volume["secret"]["secretName"] == "mine"


OPERATORS = {"app.kubernetes.io/name": "kestrl-operator"}


def secret(name: str, key: str | None, labels: dict[str, str] | None = None) -> dict[str, Any]:
    labelled = {"metadata": {"name": name, "labels": labels}} if labels else {"metadata": {"name": name}}
    return labelled if key is None else {**labelled, "data": {"key": key}}


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ([], ""),
        ([secret("sh.helm.release.v1.kestrl.v1", None, {"owner": "helm"}), secret("theirs", "bm8=")], ""),
        ([secret("theirs", "bm8="), secret("kestrl-operator-key", "b2xk", OPERATORS)], "b2xk"),
        ([secret("a-key", "b2xk", OPERATORS), secret("b-key", "b2xk", OPERATORS)], "b2xk"),
        ([secret("a-key", "b25l", OPERATORS), secret("b-key", "dHdv", OPERATORS)], None),
    ],
    ids=["none", "others'", "an earlier release's", "copied before", "two"],
)
def test_the_key_of_an_earlier_release_is_found_by_its_label(
    helm: Helm, tmp_path: Path, there: list[dict[str, Any]], left: str | None
) -> None:
    # Rendering asks no cluster for Secrets, so a chart around the chart's own template names them.
    (tmp_path / "templates").mkdir()
    shutil.copy(CHART / "templates" / "_helpers.tpl", tmp_path / "templates")
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: around\nversion: 0.1.0\n")
    (tmp_path / "templates" / "key.yaml").write_text('key: {{ include "kestrl.leftKey" .Values.there | quote }}\n')
    ended = helm.run("template", "around", str(tmp_path), values={"there": there})
    if left is None:
        assert "operator.existingKeySecret" in ended.stderr
        assert "a-key, b-key" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    assert yaml.safe_load(ended.stdout) == {"key": left}


# The definitions of AgentRLJob and SFTJob


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_is_the_one_that_the_models_give(name: str, helm: Helm) -> None:
    given = yaml.safe_load((CHART / "files" / f"{name}.yaml").read_text())
    made = helm.render().of("CustomResourceDefinition")[name]
    assert made["spec"] == given["spec"]
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_definitions_go_with_the_release_or_are_somebody_elses_when_the_values_say_so(helm: Helm) -> None:
    made = helm.render({"crds": {"keep": False}}).of("CustomResourceDefinition")
    assert sorted(made) == DEFINITIONS
    assert not any("annotations" in item["metadata"] for item in made.values())
    assert helm.render({"crds": {"install": False}}).of("CustomResourceDefinition") == {}


# Rights

Right = tuple[str, str, str]
"""API group, resource, verb."""


def rights(role: dict[str, Any]) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def operators_rights(objects: Rendered) -> set[Right]:
    """All that the operator's ServiceAccount is bound to."""
    held: set[Right] = set()
    for binding in [*objects.of("ClusterRoleBinding").values(), *objects.of("RoleBinding").values()]:
        (subject,) = binding["subjects"]
        assert subject["namespace"] == "kestrl-system"
        if subject["name"] == NAME:
            held |= rights(objects.of(binding["roleRef"]["kind"])[binding["roleRef"]["name"]])
    return held


def test_the_operators_rights_are_these(helm: Helm) -> None:
    def each(group: str, resources: str, verbs: str) -> set[Right]:
        return {(group, resource, verb) for resource in resources.split() for verb in verbs.split()}

    assert operators_rights(helm.render()) == (
        each("kestrl.dev", "agentrljobs", "get list watch delete")
        | each("kestrl.dev", "agentrljobs/status sftjobs/status", "get patch")
        | each("kestrl.dev", "sftjobs", "get list watch")
        | each("batch", "jobs", "get list watch create")
        | each("", "pods", "get list watch delete")
        | each("", "services", "get list watch create patch")
        | each("", "configmaps serviceaccounts", "get create patch")
        | each("", "secrets", "create patch")
        | each("apps", "deployments statefulsets", "get list watch create patch")
        | each("networking.k8s.io", "networkpolicies", "get list watch create patch")
        | each("policy", "poddisruptionbudgets", "get list watch create patch")
        | each("events.k8s.io", "events", "create patch")
        | each("", "events", "list")
        | each("coordination.k8s.io", "leases", "create get update patch")  # get: of other installations, too
        | each("", "nodes", "get list")
        | each("apiextensions.k8s.io", "customresourcedefinitions", "get")
    )


@pytest.mark.parametrize("kueue", [False, True])
@pytest.mark.parametrize("values", [{}, {"namespaces": ["a", "b"]}], ids=["cluster", "namespaces"])
def test_the_operator_has_the_rights_that_it_asks_for_when_it_starts(
    helm: Helm, tmp_path: Path, values: dict[str, Any], *, kueue: bool
) -> None:
    objects = helm.render({**values, "kueue": {"enabled": kueue}})
    held = operators_rights(objects)
    assert any(group == "kueue.x-k8s.io" for group, _, _ in held) is kueue
    for right in needed(config(objects, tmp_path)):
        resource = f"{right.kind.plural}/{right.subresource}".rstrip("/")
        assert (right.kind.group, resource, right.verb) in held, str(right)


@pytest.mark.parametrize("values", [{}, {"namespaces": ["a", "b"]}], ids=["cluster", "namespaces"])
def test_no_right_is_a_wildcard_and_no_secret_can_be_read(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    for role in [*objects.of("ClusterRole").values(), *objects.of("Role").values()]:
        for group, resource, verb in rights(role):
            assert "*" not in group + resource + verb
            assert (resource, verb) not in {("secrets", verb) for verb in ("get", "list", "watch", "update", "delete")}
        for rule in role["rules"]:
            assert "nonResourceURLs" not in rule
            # Leases of other installations, whose names are not known, are read only.
            own = rule["resources"] == ["leases"] and rule["verbs"] not in (["create"], ["get"])
            if own or rule["resources"] == ["customresourcedefinitions"]:
                assert rule["resourceNames"] in ([NAME], DEFINITIONS)


def test_an_install_for_namespaces_has_rights_on_jobs_in_these_alone(helm: Helm) -> None:
    objects = helm.render({"namespaces": ["a", "b"]})
    assert {name for name in objects.of("ClusterRole") if not name.startswith(f"kestrl-system-{NAME}-")} == set()
    granted = {
        item["metadata"]["namespace"]
        for item in objects
        if item["kind"] == "Role" and ("", "pods", "delete") in rights(item)
    }
    assert granted == {"a", "b"}
    bound = {
        item["metadata"]["namespace"]
        for item in objects
        if item["kind"] == "RoleBinding" and item["roleRef"]["name"] == NAME
    }
    assert bound == {"a", "b"}
    assert objects.of("Role")["kestrl-test"]["metadata"]["namespace"] == "a", "where the operator looks"
    (learners,) = (rule for rule in objects.one("NetworkPolicy")["spec"]["egress"] if "to" in rule)
    (among,) = learners["to"][0]["namespaceSelector"]["matchExpressions"]
    assert among == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_without_clusterwide_rights_nothing_clusterwide_is_left(helm: Helm) -> None:
    rbac = {"nodes": False, "definition": False, "leases": False, "aggregate": False}
    objects = helm.render({"namespaces": ["a"], "rbac": rbac, "crds": {"install": False}})
    assert {item["kind"] for item in objects if item["kind"].startswith(("ClusterRole", "Custom"))} == set()


def test_the_test_may_run_its_job_and_nothing_else(helm: Helm) -> None:
    assert rights(helm.render().of("Role")["kestrl-test"]) == {
        ("kestrl.dev", "agentrljobs", verb) for verb in ("get", "create", "delete")
    }


def test_the_log_of_the_test_is_printed_once(helm: Helm) -> None:
    # Helm prints the log of the pod that is named like a test's hook, for each hook of any kind.
    hooks = [item["kind"] for item in helm.render() if "helm.sh/hook" in item["metadata"].get("annotations", {})]
    assert hooks == ["Pod"]


def test_people_get_rights_on_jobs_with_the_clusters_own_roles(helm: Helm) -> None:
    roles = helm.render().of("ClusterRole")
    view, edit = roles[f"{NAME}-jobs-view"], roles[f"{NAME}-jobs-edit"]
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {name for name in view["metadata"]["labels"] if name.startswith(prefix)} == {
        f"{prefix}{role}" for role in ("view", "edit", "admin")
    }
    assert {name for name in edit["metadata"]["labels"] if name.startswith(prefix)} == {
        f"{prefix}{role}" for role in ("edit", "admin")
    }
    assert {verb for _, _, verb in rights(view)} == {"get", "list", "watch"}
    assert not any(resource.endswith("status") for _, resource, _ in rights(edit)), (
        "what was observed is the operator's to say"
    )


def test_a_service_account_of_ones_own_must_have_a_name(helm: Helm) -> None:
    assert "serviceAccount.name" in helm.refusal({"serviceAccount": {"create": False}})
    objects = helm.render({"serviceAccount": {"create": False, "name": "mine"}})
    assert objects.of("ServiceAccount").keys() == {"kestrl-test"}
    assert pod(objects)["spec"]["serviceAccountName"] == "mine"
    assert objects.of("ClusterRoleBinding")[NAME]["subjects"][0]["name"] == "mine"


# Pods

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(spec: dict[str, Any]) -> list[str]:
    """What Pod Security "restricted" has against a pod on Linux, as its documentation lists it."""
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    found += [f"volume {volume['name']}" for volume in spec.get("volumes", ()) if not set(volume) - {"name"} <= VOLUMES]
    whole = spec.get("securityContext", {})
    found += ["sysctls"] if whole.get("sysctls") else []
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        both = {**whole, **own}
        refused = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation", True),
            "capabilities": own.get("capabilities", {}).get("drop") != ["ALL"]
            or not set(own["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"},
            "procMount": own.get("procMount", "Default") != "Default",
            "seLinuxOptions": bool(both.get("seLinuxOptions")),
            "appArmorProfile": both.get("appArmorProfile", {}).get("type") == "Unconfined",
            "hostPort": any(port.get("hostPort") for port in container.get("ports", ())),
        }
        found += [f"{container['name']}: {name}" for name, wrong in refused.items() if wrong]
    return found


def test_every_pod_passes_pod_security_restricted_and_writes_no_root(helm: Helm) -> None:
    objects = helm.render()
    for spec in (pod(objects)["spec"], objects.one("Pod")["spec"]):
        assert violations(spec) == []
        assert all(container["securityContext"]["readOnlyRootFilesystem"] is True for container in spec["containers"])
        assert spec["enableServiceLinks"] is False


def test_the_check_of_pod_security_finds_what_it_looks_for(helm: Helm) -> None:
    spec = pod(helm.render())["spec"]
    assert violations({**spec, "hostNetwork": True}) == ["hostNetwork"]
    assert violations({**spec, "volumes": [{"name": "node", "hostPath": {"path": "/"}}]}) == ["volume node"]
    assert violations({**spec, "securityContext": {}}) == ["operator: runAsNonRoot", "operator: seccompProfile"]
    bare = {
        "name": "bare",
        "securityContext": {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
    }
    assert violations({**spec, "containers": [bare]}) == [
        "bare: allowPrivilegeEscalation",
        "bare: capabilities",
        "bare: runAsUser",
    ]


def test_two_replicas_are_spread_and_roll_one_by_one(helm: Helm) -> None:
    spec = helm.render().one("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")


def test_an_operator_that_traces_may_reach_where_its_traces_go(helm: Helm) -> None:
    def ports(otlp: str | None) -> set[int]:
        rules = helm.render({"operator": {"otlp": otlp}}).one("NetworkPolicy")["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert ports(None) == {53, 443, 6443, 7000}
    assert ports("http://collector.observability:4318/v1/traces") - ports(None) == {4318}
    assert ports("http://collector.observability") - ports(None) == {4317}


# Monitoring


def metrics_named_in(text: str) -> set[str]:
    return {name for name in re.findall(r"\bkestrl_[a-z_]+", text) if name not in {"kestrl_dev_job", "kestrl_dev_role"}}


def test_alerts_and_dashboard_name_metrics_that_there_are(helm: Helm) -> None:
    known = {instrument.prometheus for instrument in vars(Metric).values() if isinstance(instrument, Instrument)}
    objects = helm.render(None, *PROMETHEUS)
    alerts = {rule["expr"] for group in objects.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]}
    assert metrics_named_in("\n".join(alerts)) - known == set()
    dashboard = json.loads(objects.of("ConfigMap")["kestrl-dashboard"]["data"]["kestrl.json"])
    shown = {target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())}
    assert metrics_named_in("\n".join(shown)) - known == set()
    assert len(metrics_named_in("\n".join(shown))) > 35


def test_an_alert_says_what_it_means_and_values_are_in_it(helm: Helm) -> None:
    rule = {"stalledAfter": "3h", "failedShare": 0.25}
    objects = helm.render({"monitoring": {"prometheusRule": rule}, "operator": {"auditSeconds": 200}}, *PROMETHEUS)
    alerts = {
        alert["alert"]: alert for group in objects.one("PrometheusRule")["spec"]["groups"] for alert in group["rules"]
    }
    assert all(alert["annotations"].keys() == {"summary", "description"} for alert in alerts.values())
    assert {alert["labels"]["severity"] for alert in alerts.values()} == {"critical", "warning"}
    assert alerts["KestrlLearnerStalled"]["for"] == "3h"
    assert alerts["KestrlToolServerUnavailable"]["expr"] == "kestrl_tools_unavailable > 0"
    assert "{{ $labels.server }}" in alerts["KestrlToolServerUnavailable"]["annotations"]["description"]
    assert alerts["KestrlEpisodesFailing"]["expr"].endswith("> 0.25")
    assert alerts["KestrlOperatorBlind"]["expr"].endswith("> 1000"), "it is reported within five audits"


def test_alerts_on_states_of_jobs_are_behind_a_value(helm: Helm) -> None:
    def states(**rule: Any) -> dict[str, Any]:
        objects = helm.render({"monitoring": {"prometheusRule": rule}}, *PROMETHEUS)
        groups = {group["name"]: group["rules"] for group in objects.one("PrometheusRule")["spec"]["groups"]}
        return {alert["alert"]: alert for alert in groups.get("kestrl-job-states", ())}

    assert states().keys() == {"KestrlJobFailed", "KestrlJobRejected", "KestrlJobPending"}
    assert states(pendingAfter="4h")["KestrlJobPending"]["for"] == "4h"
    assert states(jobStates=False) == {}
    phases = re.findall(r'phase=~?"([^"]+)"', json.dumps(list(states().values())).replace('\\"', '"'))
    named = {phase for words in phases for phase in words.split("|")}
    known = set(re.findall(r'(?:return|else) "(\w+)"', inspect.getsource(conditions)))
    assert named <= known


def test_engines_own_metrics_are_scraped_on_demand(helm: Helm) -> None:
    def ports(values: dict[str, Any] | None) -> list[str]:
        spec = helm.render(values, *PROMETHEUS).one("PodMonitor")["spec"]
        return [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]

    assert ports(None) == ["metrics"]
    assert ports({"monitoring": {"podMonitor": {"engines": True}}}) == ["metrics", "http"]


def test_monitors_are_made_where_the_cluster_has_their_api(helm: Helm) -> None:
    without, with_api = helm.render(), helm.render(None, *PROMETHEUS)
    assert {item["kind"] for item in without} & set(MONITORS) == set()
    assert "kestrl-dashboard" not in without.of("ConfigMap")
    assert set(MONITORS) <= {item["kind"] for item in with_api}
    assert with_api.of("ConfigMap")["kestrl-dashboard"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_switch_says_more_than_what_the_cluster_has(helm: Helm) -> None:
    parts = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    on = helm.render({"monitoring": {part: {"enabled": True} for part in parts}})
    assert set(MONITORS) <= {item["kind"] for item in on}
    off = helm.render({"monitoring": {part: {"enabled": False} for part in parts}}, *PROMETHEUS)
    assert {item["kind"] for item in off} & set(MONITORS) == set()
    assert "kestrl-dashboard" not in off.of("ConfigMap")


def test_monitors_find_what_they_scrape(helm: Helm) -> None:
    objects = helm.render({"namespaces": ["a"]}, *PROMETHEUS)
    service = objects.one("Service")
    selected = objects.one("ServiceMonitor")["spec"]
    assert selected["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {item["port"] for item in selected["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    jobs = objects.one("PodMonitor")["spec"]
    assert jobs["namespaceSelector"] == {"matchNames": ["a"]}
    assert helm.render(None, *PROMETHEUS).one("PodMonitor")["spec"]["namespaceSelector"] == {"any": True}


# Values


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"operator": {"image": {"tag": "x"}}}, "image"),
        ({"jobs": {"images": {"engin": {}}}}, "engin"),
        ({"jobs": {"accelerators": {"nvidia": {"nodeselector": {}}}}}, "nodeselector"),
    ],
    ids=str,
)
def test_a_value_that_there_is_not_is_refused_by_its_name(helm: Helm, wrong: dict[str, Any], named: str) -> None:
    assert named in helm.refusal(wrong)


OTHERS: dict[str, Any] = {
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes"}}],
    "operator.logs.level": "DEBUG",
    "operator.logs.format": "json",
    "page.namespaces": [{"namespace": "b", "uri": "s3://b"}],
    "page.resources.limits.memory": "2Gi",
    "namespaces": ["a"],
    "jobs.images.pullPolicy": "Always",
    "jobs.images.pullSecrets": ["s"],
    "jobs.storage.uri": "s3://b",
    "jobs.storage.secret": "s",
    "jobs.serviceAccounts": [{"name": "s"}],
    "jobs.resources": {"learner": {"limits": {"memory": "1Gi"}}},
    "jobs.accelerators": {"mine": {"image": "cpu"}},
    "jobs.learnerState.storageClass": "fast",
    "jobs.modelCache.claim": "models",
    "jobs.modelCache.nodePath": "/models",
    "jobs.toolsRuntimeClass": "gvisor",
    "operator.pullPolicy": "Always",
    "operator.pullSecrets": ["s"],
    "operator.existingKeySecret": "s",
    "operator.otlp": "http://c:4317",
    "operator.resources.requests": {"cpu": 1},
    "operator.resources.limits": {"cpu": 1},
    "operator.priorityClassName": "high",
    "jobs.podDefaults.tolerations": [{"operator": "Exists"}],
    "jobs.engineMetricsFrom": [{"podSelector": {}}],
    "jobs.podDefaults.env": [{"name": "A", "value": "b"}],
    "operator.tolerations": [{"operator": "Exists"}],
    "operator.affinity": {"nodeAffinity": {}},
    "operator.topologySpreadConstraints": [],
    "operator.extraEnv": [{"name": "A", "value": "b"}],
    "operator.extraVolumes": [{"name": "v", "emptyDir": {}}],
    "operator.extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "networkPolicy.apiServerPorts": [8443],
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.extraEgress": [{}],
    "monitoring.interval": "5s",
    "monitoring.prometheusRule.stalledAfter": "3h",
    "monitoring.prometheusRule.failedShare": 0.5,
}
"""Another value, where the default does not tell one."""


PAGE = {"namespace": "a", "uri": "s3://a"}


def leaves(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{above}{name}"
        inside = isinstance(value, dict) and value and path not in OTHERS and not path.endswith(("labels", "Labels"))
        found |= leaves(value, f"{path}.") if inside else {path: value}
    return found


def another(path: str, value: Any) -> Any:
    if path in OTHERS:
        return OTHERS[path]
    if isinstance(value, bool) or path.endswith(".enabled"):
        return value is False
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return value[1:]
    return {"other": "value"} if isinstance(value, dict) else f"{value}other"


@pytest.mark.timeout(300)
def test_every_value_changes_something(helm: Helm) -> None:
    def made(path: str, value: Any) -> list[dict[str, Any]]:
        values = nested(path, value)
        values["page"] = {"namespaces": [PAGE], **values.get("page", {})}  # without one its other values say nothing
        objects = helm.render(values, *PROMETHEUS)
        for secret in objects.of("Secret").values():
            secret["data"] = "random"
        return list(objects)

    values = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    before = made("nameOverride", "")
    with ThreadPoolExecutor() as pool:
        after = pool.map(made, values, (another(path, value) for path, value in values.items()))
        idle = [path for path, objects in zip(values, after, strict=True) if objects == before]
    assert idle == []


def nested(path: str, value: Any) -> dict[str, Any]:
    """The values with this one only."""
    *above, last = path.split(".")
    # A ServiceAccount needs a name when the chart makes none.
    made: dict[str, Any] = {last: value, **({"name": "mine"} if path == "serviceAccount.create" else {})}
    for name in reversed(above):
        made = {name: made}
    return made


def test_a_release_is_far_from_the_largest_that_helm_can_store(helm: Helm, tmp_path: Path) -> None:
    command = [helm.program, "package", str(CHART), "--destination", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tgz")
    assert archive.stat().st_size < 300_000
