"""The Prometheus endpoint of a service, read over HTTP as Prometheus reads it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.telemetry import names
from kestrl._shared.telemetry.names import Instrument, Metric

INSTRUMENTS = {name: item for name, item in vars(Metric).items() if isinstance(item, Instrument)}
SERVICE = """
import sys, urllib.request
from collections import Counter
from kestrl._shared.telemetry import set_up
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric

failures = Counter()
observe(Metric.FAILURES, lambda: failures)  # before anybody looks, as a service does that is made before it is set up
set_up("learner-0", job="j", run="j-1", metrics_listen=sys.argv[1])
observe(Metric.STEP, lambda: 7)
observe(Metric.STEP_SECONDS, lambda: {"collect": 1.5, "update": 0.25})
failures["tool", "tool_raised"] += 2
print(urllib.request.urlopen(f"http://{sys.argv[1]}/metrics").read().decode())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_metrics_are_served_with_their_labels_and_the_process_own() -> None:
    done = run(SERVICE, f"127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"otel_scope_\w+=\"[^\"]*\",?", "", line).replace(",}", "}") for line in done.stdout.splitlines()]
    served = {
        line.rpartition(" ")[0].replace("{}", ""): float(line.rpartition(" ")[2])
        for line in lines
        if line and line[0] != "#"
    }
    assert served["kestrl_learner_step"] == 7
    assert served['kestrl_learner_step_seconds{part="collect"}'] == 1.5
    assert served['kestrl_learner_failures_total{boundary="tool",code="tool_raised"}'] == 2
    assert served["process_resident_memory_bytes"] > 1e6
    assert any('kestrl_run_id="j-1"' in line and 'service_instance_id="learner-0"' in line for line in lines)


def test_a_taken_port_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(SERVICE, f"127.0.0.1:{taken.getsockname()[1]}")
    assert "UserInputError: metrics: cannot listen on 127.0.0.1" in done.stderr


def test_without_set_up_nothing_is_read() -> None:
    code = (
        "import sys\nfrom kestrl._shared.telemetry.metrics import observe\n"
        "from kestrl._shared.telemetry.names import Metric\n"
        "observe(Metric.STEP, lambda: 1 / 0)\nprint('opentelemetry.sdk' in sys.modules, 'prometheus_client' in "
        "sys.modules)"
    )
    assert run(code).stdout.split() == ["False", "False"]


def test_every_metric_has_a_unique_name_and_a_reader() -> None:
    assert len({item.name for item in INSTRUMENTS.values()}) == len(INSTRUMENTS)
    root = Path(names.__file__).parents[4]
    sources = [path.read_text() for folder in ("src", "services", "operator") for path in (root / folder).rglob("*.py")]
    for name in INSTRUMENTS:
        assert any(re.search(rf"(?:observe|measured)\(\s*Metric\.{name},", text) for text in sources), (
            f"{name} is offered by nobody"
        )


@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=lambda item: item.name)
def test_names_are_of_the_field(instrument: Instrument) -> None:
    assert re.fullmatch(r"kestrl\.[a-z]+(\.[a-z_]+)+", instrument.name)
    assert instrument.description
    assert not instrument.description.endswith(".")
