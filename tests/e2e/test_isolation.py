"""Connections from inside the pods of tools and of a judge of rules."""

from __future__ import annotations

import json
import re

import pytest

from .cluster.client import Cluster
from .installation import Installation, small

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.share]
STEPS = 100
"""Steps of a job whose pods are examined: more than it can do meanwhile, since the pods go when it ends."""
REACH = """
import json, os, socket, sys
def reaches(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        return True
    except OSError:
        return False
print(json.dumps([reaches(*target.rsplit(":", 1)) for target in sys.argv[1:]]))
"""


def reached(cluster: Cluster, namespace: str, role: str, *targets: str) -> list[bool]:
    """Targets that a role's pod can connect to."""
    pod = cluster.list("pods", namespace, f"kestrl.dev/role={role}")[0]["metadata"]["name"]
    return json.loads(cluster.exec(pod, "python", "-c", REACH, *targets, namespace=namespace, container=role))


def test_a_tools_pod_has_no_egress_and_only_workers_reach_it(
    installation: Installation, network_policies: Cluster
) -> None:
    cluster = network_policies
    with installation.place("ours") as ours, installation.place("theirs") as theirs:
        cluster.apply(small("ours", schedule__maxSteps=STEPS), ours)
        cluster.apply(small("theirs", schedule__maxSteps=STEPS), theirs)
        for name, namespace in (("ours", ours), ("theirs", theirs)):
            for role in ("tools", "judge", "rollout"):
                cluster.wait_for(
                    "deployment",
                    f"{name}-{role}",
                    lambda found: found["status"].get("readyReplicas", 0) >= 1,
                    namespace,
                    seconds=200,
                )
        address = {
            (namespace, role): cluster.list("pods", namespace, f"kestrl.dev/role={role}")[0]["status"]["podIP"]
            for namespace in (ours, theirs)
            for role in ("tools", "judge", "rollout")
        }
        own, other = address[ours, "judge"], address[theirs, "judge"]
        api = cluster.get("endpointslice", "kubernetes", "default")["endpoints"][0]["addresses"][0]
        store = f"{installation.store.host}:{installation.store.ports['proxy']}"
        assert (
            reached(
                cluster,
                ours,
                "tools",
                f"{own}:7000",
                f"{other}:7000",
                f"{address[theirs, 'tools']}:7000",
                f"{address[ours, 'rollout']}:7000",
                "169.254.169.254:80",
                store,
                "kubernetes.default.svc:443",
                f"{api}:6443",
            )
            == [False] * 8
        )
        assert reached(cluster, ours, "judge", store, f"{api}:6443", f"{other}:7000") == [False] * 3
        assert reached(cluster, ours, "rollout", f"{address[ours, 'tools']}:7000", f"{own}:7000") == [True, True]
        assert reached(cluster, ours, "rollout", f"{address[theirs, 'tools']}:7000", f"{other}:7000") == [False, False]


def test_no_pod_of_a_job_has_a_token_or_a_secret_of_another(installation: Installation) -> None:
    cluster = installation.cluster
    with installation.place("tokens") as namespace:
        cluster.apply(small("tokens", schedule__maxSteps=STEPS), namespace)
        cluster.wait_for(
            "deployment",
            "tokens-tools",
            lambda found: found["status"].get("readyReplicas", 0) == 1,
            namespace,
            seconds=200,
        )
        pod = cluster.list("pods", namespace, "kestrl.dev/role=tools")[0]["metadata"]["name"]
        look = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'), sorted(os.environ), os.getuid())"
        seen = cluster.exec(pod, "python", "-c", look, namespace=namespace, container="tools")
        assert seen.startswith("False ")
        tokens = [word for word in re.findall(r"\w+", seen) if word.startswith("KESTRL_") and word.endswith("_TOKEN")]
        assert tokens == ["KESTRL_ROLLOUT_TO_TOOLS_TOKEN"]
        assert "AWS_" not in seen, "a tool has no way to the storage"
        assert "KESTRL_ENGINE" not in seen
        assert seen.strip().endswith(" 10001")
        for item in cluster.list("pods", namespace):
            assert not any("serviceAccountToken" in json.dumps(volume) for volume in item["spec"]["volumes"])
