"""`kestrl -n NAMESPACE` on a real cluster, by a real kubectl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.installation import Installation, Object, is_true, newest_adapter, small

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME = "shown"
STEPS = 400
"""More steps than the job does before it is suspended, on any machine."""


def is_published(job: Object) -> bool:
    return bool(job.get("status", {}).get("policy", {}).get("uri"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_is_shown_and_suspended_by_the_program(installation: Installation, tmp_path: Path) -> None:
    cluster, store = installation.cluster, installation.store

    def kestrl(*arguments: str, code: int = 0, program: str = "kestrl") -> str:
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), **store.environment()}
        command = [str(Path(sys.executable).with_name(program)), "-n", namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    with installation.place() as namespace:
        assert "NotFound" in kestrl("status", NAME, code=2)
        cluster.apply(small(NAME, schedule__maxSteps=STEPS), namespace)
        installation.wait_for_adapter(NAME, namespace, 1, 420)
        installation.wait(NAME, namespace, is_published, 120)
        assert NAME in kestrl("status")
        lines = kestrl("status", NAME).splitlines()
        assert lines[0].startswith(f"{NAME}  phase ")
        assert any(line.split()[:2] == ["Accepted", "True"] for line in lines)
        assert f"[pod/{NAME}-learner-0/learner]" in kestrl("logs", NAME, "-c", "learner", "-n", "5")
        assert len(kestrl("episodes", NAME, "--step", "1").splitlines()) == 16
        exported = tmp_path / "adapter"
        assert f"-> {exported}" in kestrl("export", NAME, "--step", "1", "--out", str(exported))
        assert (exported / "adapter_model.safetensors").stat().st_size
        assert "pages in" in kestrl("ui", NAME, "--export", str(tmp_path / "pages"))
        assert "finishes its step" in kestrl("suspend", NAME, program="kubectl-kestrl")
        installation.wait(NAME, namespace, is_true("Suspended"), 240)
        assert kestrl("status", NAME).startswith(f"{NAME}  phase Suspended")
        step = newest_adapter(installation, NAME)
        assert "is to run" in kestrl("resume", NAME)
        installation.wait_for_adapter(NAME, namespace, step + 1, 420)
