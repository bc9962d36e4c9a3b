"""A job with a generator of reasoning-gym on a real engine: listed, checked and trained, with ten lines of YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrl._app.local.rundir import RunDir

from .runs import belonging_to, kestrl, summary_of

SETTINGS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
JOB = f"""\
apiVersion: kestrl.dev/v1alpha1
kind: AgentRLJob
metadata: {{name: sums}}
spec:
  model: {{base: "demo://tiny"}}
  data: {{train: {{uri: rows.jsonl, size: 8}}}}
  agent: {{maxTokens: 32}}
  environment: {{reasoningGym: {{generator: chain_sum, config: {SETTINGS}}}}}
  algorithm: {{groupSize: 4, groupsPerStep: 2}}
  schedule: {{maxSteps: 2}}
"""
pytestmark = [pytest.mark.engine, pytest.mark.share(4), pytest.mark.timeout(1500)]


def test_a_generator_is_listed_checked_and_trained(tmp_path: Path) -> None:
    """The tiny model knows no sums, so that it earns nothing: every part works, and the run says so itself."""
    job, rows, runs = tmp_path / "job.yaml", tmp_path / "rows.jsonl", tmp_path / "runs"
    job.write_text(JOB, encoding="utf-8")
    config = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    kestrl("data", "reasoning-gym", "chain_sum", "--size", "8", "--config", config, "--out", rows)
    checked = kestrl("env", "check", job, "--rows", "2")
    assert "doing nothing earns 0, a wrong answer earns 0, the solution earns 1" in checked
    printed = kestrl("run", job, "--runs", runs)
    run = RunDir(runs / "sums-1")
    summary = summary_of(run)
    assert (summary["status"], summary["steps"], summary["failures"]) == ("succeeded", 2, {})
    assert "nothing was learned" in printed
    assert belonging_to(runs) == []
