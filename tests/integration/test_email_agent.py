"""The commands of docs/email-agent.md that need an engine: from a maildir to a trained adapter, and policies side by
side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .runs import ROOT, belonging_to, kestrl

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.xdist_group("email-agent"), pytest.mark.share]
SHORT = ("--set", "schedule.maxSteps=2", "--set", "data.validation.size=3")


def test_a_maildir_becomes_an_adapter_that_is_evaluated(tmp_path: Path) -> None:
    kestrl("email", "sample-maildir", "--out", tmp_path / "maildir", "--mails", "300")
    kestrl("email", "build-db", "--source", tmp_path / "maildir", "--out", tmp_path / "mail.db")
    questions = ("email", "questions", tmp_path / "mail.db", "--out", tmp_path / "questions.jsonl", "--scripted")
    kestrl(*questions, "--inboxes", "4", "--per-inbox", "10")
    shutil.copy(ROOT / "examples/email-search/mailbox.yaml", tmp_path)
    runs = tmp_path / "runs"
    kestrl("run", tmp_path / "mailbox.yaml", "--runs", runs, *SHORT)
    steps = [json.loads(path.read_text()) for path in sorted((runs / "email-mailbox-1" / "metrics").glob("0*.json"))]
    assert len(steps) == 2
    assert any(step["grad_norm"] > 0 for step in steps)
    kestrl("export", "email-mailbox-1", "--runs", runs, "--out", tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    printed = kestrl("eval", "email-mailbox-1", "--runs", runs, "--policy", "v2", "--details", *SHORT[2:])
    (kept,) = (runs / "email-mailbox-1" / "evaluations").glob("*.json")
    (trained,) = json.loads(kept.read_text())
    assert trained["label"] == "v2"
    assert trained["means"]["episodes"] == 3
    assert trained["means"]["exceptions"] == 0
    assert "ground truth: " in printed
    assert belonging_to(runs) == []
