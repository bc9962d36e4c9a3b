"""docs/telemetry.md is that of the code, what it names is sent, and the dashboard shows nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.tail_sampling import tail_sampling

from kestrl._shared.telemetry.names import Attr, EventName, Instrument, Metric, SpanName

ROOT = Path(__file__).parents[3]
NAMES = ROOT / "src/kestrl/_shared/telemetry/names.py"


def test_the_page_is_that_of_the_code() -> None:
    done = subprocess.run([sys.executable, "scripts/gen_telemetry.py", "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_the_page_has_every_name() -> None:
    page = (ROOT / "docs/telemetry.md").read_text()
    constants = [value for kind in (SpanName, Attr, EventName) for name, value in vars(kind).items() if name.isupper()]
    metrics = [value for value in vars(Metric).values() if isinstance(value, Instrument)]
    assert len(constants) >= 40
    assert len(metrics) > 50
    rows = {row.split(" | ")[0].strip("| `") for row in page.splitlines() if row.startswith("| `")}
    assert rows == {*constants, *(metric.name for metric in metrics)}


def test_the_collectors_policies_have_names_of_the_code() -> None:
    policies = tail_sampling()["processors"]["tail_sampling"]["policies"]
    conditions = [span for policy in policies for span in policy.get("ottl_condition", {}).get("span", ())]
    named = [name for condition in conditions for name in re.findall(r'"([^"]+)"', condition)]
    assert named == [SpanName.PUBLISH, Attr.FAILURE_BOUNDARY, Attr.ADVANTAGE, Attr.REWARD]


@pytest.mark.parametrize("kind", [SpanName, Attr, EventName, Metric], ids=lambda kind: kind.__name__)
def test_every_name_is_used(kind: type) -> None:
    code = "".join(
        path.read_text()
        for folder in ("src", "services", "operator")
        for path in (ROOT / folder).rglob("*.py")
        if path != NAMES and "api" not in path.parts
    )
    names = [name for name in vars(kind) if name.isupper()]
    used = set(re.findall(rf"\b{kind.__name__}\.(\w+)", code))
    assert set(names) - used == set()


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    known = {metric.prometheus for metric in vars(Metric).values() if isinstance(metric, Instrument)}
    dashboard = json.loads((ROOT / "charts/kestrl/dashboards/kestrl.json").read_text())
    shown = "\n".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    named = set(re.findall(r"\bkestrl_(?!dev_)\w+", shown))
    assert len(named) > 35
    assert named - known == set()
