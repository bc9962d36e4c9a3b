"""The commands of docs/try-on-kubernetes.md for a cluster of this machine, as typed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster.choice import Unavailable, usable_kit
from tests.e2e.cluster.up import find
from tests.e2e.trial.__main__ import TRIAL
from tests.unit.docs.kubernetes_page import HERE, commands

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def typed(lines: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a reader sees who types these lines in a checkout."""
    environment = {**os.environ, "KESTRL_E2E_STATE": str(folder)}
    return subprocess.run(
        ["bash", "-euc", lines],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder for the trial's cluster, on a disk."""
    try:
        usable_kit()
    except Unavailable as error:
        pytest.skip(str(error))
    if find(TRIAL) is not None:
        pytest.skip("the trial of this checkout is up: make cluster-down")
    folder = Path("/var/tmp/kestrl-e2e-trial")
    yield folder
    typed("make cluster-down", folder)
    assert [path.name for path in folder.iterdir()] == [".lock"], "it leaves nothing"


@pytest.mark.timeout(1800)
def test_the_page_s_commands_show_a_job_that_trains(state: Path) -> None:
    first, *rest = commands(HERE)
    assert "make cluster-up" in first
    seen = typed("\n".join([first, f"echo; echo --- again; {first}", *rest]), state)
    assert seen.returncode == 0, seen.stdout + seen.stderr
    assert seen.stderr.count("is submitted to namespace team-a") == 1, "a second cluster-up only says that it runs"
    assert "Running" in seen.stdout
    assert "eval-0-" in seen.stdout, "episodes, read from the cluster's storage"
    assert "is gone" in seen.stderr
