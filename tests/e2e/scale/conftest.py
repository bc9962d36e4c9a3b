"""The control plane, as the operator and the loop beside it call it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import yaml
from tests.e2e.cluster.client import Cluster


@pytest.fixture
def by_token(control_plane_with_crds: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The control plane, called by the operator and the loop beside it with a service account's token, as from a pod.

    (An administrator's certificate is verified at each request, which takes a fifteenth of the API server's time here.)
    """
    cluster, name = control_plane_with_crds, f"scale-{secrets.token_hex(4)}"
    cluster.kubectl("create", "serviceaccount", name, "--namespace=default")
    cluster.kubectl(
        "create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--serviceaccount=default:{name}"
    )
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {
        "token": cluster.kubectl("create", "token", name, "--namespace=default", "--duration=2h").strip()
    }
    own = tmp_path / "kubeconfig"
    own.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(own))
    return cluster
