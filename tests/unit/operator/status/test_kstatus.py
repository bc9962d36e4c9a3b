"""kstatus, by which Flux judges an object, says of a job's statuses what the table of columns says it does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.go import find_go
from tests.unit.operator.samples import NOW
from tests.unit.operator.status.test_columns import LINES, TRAINED, written

from kestrl_operator.status.build import with_failure
from kestrl_operator.status.conditions import QUARANTINED

KSTATUS = Path(__file__).parents[4] / "scripts" / "kstatus"
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]  # its module takes minutes to compile


def test_kstatus_agrees() -> None:
    go = find_go()
    if go is None:
        pytest.skip("there is no go: make kit installs one")
    quarantined = with_failure(TRAINED, "it killed an operator", generation=3, now=NOW, reason=QUARANTINED)
    statuses = [({"observedGeneration": -1}, "InProgress"), (quarantined, "Failed")]
    statuses += [(written(line), line.verdict) for line in LINES]
    objects = [
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "job", "namespace": "team-a", "generation": 3},
            "status": given,
        }
        for given, _ in statuses
    ]
    verdicts = subprocess.run(
        [go, "run", "."], cwd=KSTATUS, input=json.dumps(objects), capture_output=True, text=True, check=True
    ).stdout.split()
    assert verdicts == [verdict for _, verdict in statuses]
