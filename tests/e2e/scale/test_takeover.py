"""An operator of today takes over the objects of an older release on a real API server: it accepts each change, and no
workload is changed twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import eventually

from kestrl_operator.apiserver.client import Api

from .operating import held, operating, places

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]
NAMESPACE, JOB = "takeover", "email-search"
OLDER = (Path(__file__).parents[2] / "data" / "objects_of_cf80a83.json").read_text()
CRD = "agentrljobs.kestrl.dev"


async def apply_older(uid: str) -> None:
    """Applies the older release's objects as its operator did."""
    api = Api()
    try:
        for item in json.loads(OLDER.replace("UID-OF-THE-JOB", uid))["objects"]:
            await api.apply({**item, "metadata": {**item["metadata"], "namespace": NAMESPACE}})
    finally:
        await api.close()


def generations(cluster: Cluster) -> dict[str, int]:
    listed = [*cluster.list("statefulsets", NAMESPACE), *cluster.list("deployments", NAMESPACE)]
    return {item["metadata"]["name"]: item["metadata"]["generation"] for item in listed}


def test_each_workload_of_an_older_release_is_changed_once(by_token: Cluster, tmp_path: Path) -> None:
    if by_token.own is None:
        pytest.skip("the controllers of a cluster that is not the harness's own cannot be held")
    with places(by_token, NAMESPACE), held(by_token):
        kind = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob"}
        by_token.apply({**kind, "metadata": {"name": JOB}, "spec": json.loads(OLDER)["spec"]}, NAMESPACE)
        asyncio.run(apply_older(by_token.get(CRD, JOB, NAMESPACE)["metadata"]["uid"]))
        before = generations(by_token)
        assert set(before.values()) == {1}
        with operating(tmp_path) as operator:
            eventually("each is changed", lambda: set(generations(by_token).values()) == {2}, 60)
            passes = operator.passes()
            by_token.kubectl("annotate", CRD, JOB, f"--namespace={NAMESPACE}", "seen=again")
            eventually("it is looked at again", lambda: operator.passes() > passes, 30)
            status: dict[str, Any] = by_token.get(CRD, JOB, NAMESPACE)["status"]
            assert {item["type"]: item["status"] for item in status["conditions"]}["Accepted"] == "True"
        with operating(tmp_path) as operator:
            eventually("the next operator looks at it", lambda: operator.passes() > 0, 60)
        assert generations(by_token) == dict.fromkeys(before, 2)
