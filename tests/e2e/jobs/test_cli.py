"""`kestrl -n NAMESPACE` on a real cluster, by a real kubectl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.installation import Installation, at_step, is_true, small

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME = "shown"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_is_shown_and_suspended_by_the_program(installation: Installation) -> None:
    cluster, store = installation.cluster, installation.store

    def kestrl(*arguments: str, code: int = 0, program: str = "kestrl") -> str:
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), **store.environment()}
        command = [str(Path(sys.executable).with_name(program)), "-n", namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    with installation.place() as namespace:
        assert "NotFound" in kestrl("status", NAME, code=2)
        cluster.apply(small(NAME, schedule__maxSteps=40), namespace)
        installation.wait(NAME, namespace, at_step(1), 420)
        assert NAME in kestrl("status")
        lines = kestrl("status", NAME).splitlines()
        assert lines[0].startswith(f"{NAME}  phase ")
        assert any(line.split()[:2] == ["Accepted", "True"] for line in lines)
        assert f"[pod/{NAME}-learner-0/learner]" in kestrl("logs", NAME, "-c", "learner", "-n", "5")
        assert len(kestrl("episodes", NAME, "--step", "1").splitlines()) == 16
        assert "drains" in kestrl("suspend", NAME, program="kubectl-kestrl")
        installation.wait(NAME, namespace, is_true("Suspended"), 240)
        assert "resumes" in kestrl("resume", NAME)
        installation.wait(NAME, namespace, lambda job: not is_true("Suspended")(job), 120)
