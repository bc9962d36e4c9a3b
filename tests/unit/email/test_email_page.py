"""The commands of docs/email-agent.md: those that need neither an engine nor a bucket are executed, with a scripted
model behind the endpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.chat_model import ScriptedChat

from kestrl._shared.spec import read_job
from kestrl.data.rows import load_scenarios
from kestrl_email.guide_settings import VARIABLES, Command, options
from kestrl_email.rewards import Evidence

pytestmark = pytest.mark.share
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/email-agent.md").read_text()
NEED_MORE = ("kestrl run", "kestrl eval", "kestrl export", "aws ")
"""Beginnings of lines that need an engine or a bucket."""
PRESETS = ("quick", "small", "medium", "full")


def commands() -> list[str]:
    """Lines of the page's shell blocks, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def scripted(request: Mapping[str, Any]) -> dict[str, Any]:
    """A model that writes a question about the first mail, and as an agent answers at once."""
    if "tools" in request:
        return {"tool_calls": [("return_final_answer", {"answer": "I don't know", "sources": []})]}
    shown = json.loads(request["messages"][1]["content"].removeprefix("<mails>").removesuffix("</mails>"))
    item = {"question": "Where is it?", "answer": "Oslo", "aliases": [], "evidence": "any", "how_realistic": 1}
    return {"content": json.dumps({"questions": [{**item, "message_ids": [shown[0]["message_id"]]}]})}


def in_shell(line: str, folder: Path, **environment: str) -> str:
    """Runs a line of shell with this environment's `kestrl`; returns what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={**os.environ, "PATH": path, "COLUMNS": "200", **environment},
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_of_the_page_work(tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line for line in commands() if not line.startswith(NEED_MORE)]
    assert len(lines) == 10
    with ScriptedChat(scripted) as chat:
        printed = {line: in_shell(line, tmp_path, OPENAI_BASE_URL=chat.url, OPENAI_API_KEY="key") for line in lines}
    said = "\n".join(printed.values())
    assert "600 mails" in said
    assert "2 malformed" in said
    assert "questions.jsonl: 120 questions about 6 inboxes" in said
    assert "questions.validation.jsonl: 40 questions about 2 inboxes" in said
    assert "--set data.train.size=20 --set schedule.evalEvery=5" in said
    assert "valid, 10 train scenarios" in said
    assert "returned_i_dont_know" in said
    assert (tmp_path / "written.validation.jsonl").is_file()


def test_presets_have_the_values_of_the_table():
    rows = re.findall(r"^\| \w+ \| `([\w.]+)` \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 9
    for field, values in rows:
        for preset, value in zip(PRESETS, values.split("|"), strict=True):
            found: Any = yaml.safe_load((ROOT / f"examples/email-search/{preset}.yaml").read_text())["spec"]
            for name in field.split("."):
                found = found[name]
            assert found == float(value), (preset, field)


def test_presets_have_the_steps_of_the_table():
    (steps,) = re.findall(r"^\| steps: .*? \| \|(.*)\|$", PAGE, re.MULTILINE)
    for preset, value in zip(PRESETS, steps.split("|"), strict=True):
        spec = read_job(ROOT / f"examples/email-search/{preset}.yaml", ()).spec
        assert spec.data.train.size is not None
        assert spec.data.train.size * spec.schedule.epochs // spec.algorithm.groups_per_step == int(value)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_of_the_guide_is_an_option_of_its_commands(variable: Any):
    assert f"`{variable.name}" in PAGE
    value = ("60" if variable.name == "LITELLM_TIMEOUT" else "4") if "{}" in variable.option else "true"
    for command in Command:
        words = options({variable.name: value}, command)
        assert words == (variable.option.format(value).split() if command in variable.commands else [])
        settings = [word for word in words if "=" in word]
        read_job(ROOT / "examples/email-search/quick.yaml", settings)


def test_a_variable_with_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch):
    from kestrl.errors import UserInputError

    for name, value in (("EVAL_STEPS", "often"), ("NUM_EPOCHS", "0"), ("VERBOSE", "maybe"), ("LEARNING_RATE", "-1")):
        with pytest.raises(UserInputError, match=f"{name}={value}: "):
            options({name: value}, Command.RUN)
    assert options({"VERBOSE": "false", "BENCH_SEQUENTIAL": "0"}, Command.BENCH) == []


def test_the_row_of_the_page_is_a_row(tmp_path: Path) -> None:
    block = re.search(r'^```json\n(\{\n  "prompt".*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(json.loads(block[1])) + "\n")
    (scenario,) = load_scenarios(path)
    assert list(scenario.tools_kwargs) == ["search_emails", "read_email", "return_final_answer"]
    assert Evidence.of(scenario.ground_truth).message_ids == ("<17@x.example>",)
