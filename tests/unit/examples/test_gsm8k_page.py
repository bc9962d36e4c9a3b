"""The commands of docs/gsm8k.md that need no engine, as a reader types them in beside the manifests."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.tasks.word_problems import Form, generated
from kestrl._app.tasks.writing import write_rows
from kestrl.data import load_scenarios
from kestrl.data.conversations import read_conversations

pytestmark = pytest.mark.share
ROOT = Path(__file__).parents[3]
TYPED = re.compile(r"^\$ kestrl (.+)$", re.MULTILINE)
WITH_AN_ENGINE = "verify"


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "gsm8k", tmp_path, dirs_exist_ok=True)
    for name, split in (("train.jsonl", "train"), ("test.jsonl", "validation")):  # in place of GSM8K's own files
        write_rows(tmp_path / name, generated(Form.ORIGINAL, split=split, seed=1, size=150))
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in TYPED.findall((ROOT / "docs" / "gsm8k.md").read_text())]
    assert {command[0] for command in commands} == {"data", "validate", WITH_AN_ENGINE}
    printed = ""
    for command in commands:
        if command[0] != WITH_AN_ENGINE:
            done = CliRunner().invoke(app, command)
            assert done.exception is None, (command, done.output, done.exception)
            printed += done.output
    assert "tool.yaml: valid, 150 train scenarios, 150 validation scenarios" in printed
    ids = [{row.id for row in load_scenarios(tmp_path / name)} for name in ("held-out.jsonl", "rest.jsonl")]
    assert (len(ids[0]), len(ids[1]), ids[0] & ids[1]) == (50, 100, set())
    assert len(read_conversations(tmp_path / "transcripts.jsonl")) == 100
