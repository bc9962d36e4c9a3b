"""A file of object storage that tools read: another pod fetches it, theirs have neither credentials nor egress."""

from __future__ import annotations

import hashlib
import json

import obstore
import pytest
from tests.e2e.cluster.commands import CommandFailed
from tests.e2e.installation import BUCKET, Installation, condition, is_true, small, summary

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME, TEXT = "with-files", b"There are seven boxes."
STEPS = 3
ROWS = [{"id": f"row-{number}", "prompt": f"How many boxes? ({number})", "ground_truth": "7"} for number in range(8)]


@pytest.mark.timeout(600)
@pytest.mark.share(3)
def test_tools_read_a_file_that_another_pod_has_fetched(installation: Installation) -> None:
    cluster = installation.cluster
    folder = str(cluster.node.layout.checkout / "tests" / "fakes")
    patch = {"spec": {"containers": [{"name": "tools", "workingDir": folder}]}}
    digest = hashlib.sha256(TEXT).hexdigest()
    uri, other = (f"s3://{BUCKET}/shelf.txt#sha256={each}" for each in (digest, hashlib.sha256().hexdigest()))
    obstore.put(installation.bucket, "shelf.txt", TEXT)
    obstore.put(installation.bucket, "shelf.jsonl", "".join(f"{json.dumps(row)}\n" for row in ROWS).encode())

    def job(name: str, file: str) -> dict[str, object]:
        return small(
            name,
            data__train={"uri": f"s3://{BUCKET}/shelf.jsonl"},
            data__files=[{"uri": file, "size": "1Mi"}],
            agent={"maxTurns": 2, "maxTokens": 64},
            tools=[{"name": "shelf", "use": "user_images:Shelf", "config": {"file": file}}],
            rewards=[{"rule": "flexible_answer"}],
            patches=[{"role": "tools", "template": patch}],
            algorithm__groupSize=2,
            algorithm__groupsPerStep=2,
            schedule__maxSteps=STEPS,
        )

    with installation.place() as namespace:
        cluster.apply(job("other-file", other), namespace)
        refused = installation.wait(
            "other-file", namespace, lambda seen: "digest" in condition(seen, "Accepted")[2], 300
        )
        assert condition(refused, "Accepted")[:2] == ("False", "Unresolvable")
        cluster.delete("agentrljobs.kestrl.dev", "other-file", namespace)
        cluster.apply(job(NAME, uri), namespace)
        cluster.wait_for(
            "deployment",
            f"{NAME}-tools",
            lambda seen: seen["status"].get("readyReplicas") == 1,
            namespace,
            seconds=200,
        )
        tools = cluster.list("pods", namespace, f"kestrl.dev/job={NAME},kestrl.dev/role=tools")[0]["metadata"]["name"]
        place = f"/kestrl/files/{digest}/shelf.txt"
        assert cluster.exec(tools, "cat", place, namespace=namespace, container="tools") == TEXT.decode()
        with pytest.raises(CommandFailed, match="Read-only"):
            cluster.exec(tools, "rm", place, namespace=namespace, container="tools")
        ended = installation.wait(NAME, namespace, is_true("Succeeded"), 300)
        report = summary(installation, ended)
        assert (report["status"], report["steps"], report["failures"]) == ("succeeded", STEPS, {})
