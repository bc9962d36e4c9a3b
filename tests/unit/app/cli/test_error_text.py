"""What is printed of failures that people provoke: at most six lines, the cause first, a fix, nothing wrapped."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.unit.app.cli.test_front_door import kestrl

from kestrl._app.error_text import LONGEST_LINE, MOST_KEPT, MOST_LINES, VARIABLE, abridged, error_lines
from kestrl.errors import SeveralProblems, UserInputError

HEAD = "apiVersion: kestrl.dev/v1alpha1\nkind: AgentRLJob\nmetadata: {name: job}\nspec:\n"
JOB = HEAD + "  model: {base: 'demo://tiny'}\n  data: {train: {uri: rows.jsonl}}\n  rewards: [{rule: format}]\n"
FILES = {
    "job.yaml": JOB,
    "many.yaml": HEAD
    + "  algorithm: {group_size: 0, lr: 1, clip: {low: x}}\n  schedule: {epochs: -1}\n"
    + "  foo: 1\n  inference: {engine: x}\n",
    "flow.yaml": "[1, 2",
    "tab.yaml": "a: b\n\tc: d\n",
    "empty.yaml": "",
    "raises.yaml": JOB.replace("format", "'raises:reward'"),
    "raises.py": "raise RuntimeError('the cause\\n' + '\\n'.join(f'detail {n}' for n in range(40)))\n",
    "wordy.yaml": JOB.replace("format", "'wordy:reward'"),
    "wordy.py": "raise RuntimeError('the cause ' + 'x' * 3000)\n",
    "rows.jsonl": '{"id": 1, "question": "?", "ground_truth": "1"}\n',
    "badrows.jsonl": '{"promptt": "x"}\n' * 30,
    "badrows.yaml": JOB.replace("rows.jsonl", "badrows.jsonl"),
    "norows.yaml": JOB.replace("rows.jsonl", "nowhere.jsonl"),
    "nomodel.yaml": JOB.replace("demo://tiny", "/nowhere/model"),
}


class Provoked(NamedTuple):
    """A command that fails."""

    command: str
    cause: str
    """In the first line of what is printed."""
    fix: str = ""
    """Anywhere in it."""
    code: int = 2


PROVOKED = [
    Provoked("validate nowhere.yaml", "nowhere.yaml: cannot be read"),
    Provoked("validate .", "Is a directory"),
    Provoked("validate many.yaml", "spec.", "more problems"),
    Provoked("validate flow.yaml", "flow.yaml: not YAML", "the whole text: "),
    Provoked("validate tab.yaml", "tab.yaml: not YAML", "cannot start any token"),
    Provoked("validate empty.yaml", "empty.yaml: holds 0 documents", "one AgentRLJob"),
    Provoked("validate raises.yaml", "cannot import 'raises': RuntimeError: the cause", "beside the manifest?"),
    Provoked("validate wordy.yaml", "cannot import 'wordy': RuntimeError: the cause", "beside the manifest?"),
    Provoked("validate badrows.yaml", "badrows.jsonl:1: promptt: unknown field", "did you mean prompt?"),
    Provoked("run raises.yaml", "cannot import 'raises'", "beside the manifest?"),
    Provoked("run norows.yaml", "nowhere.jsonl"),
    Provoked("run nomodel.yaml", "spec.model.base: /nowhere/model does not exist"),
    Provoked("run", "Missing argument 'manifest'.", "kestrl run -h explains it"),
    Provoked("runn job.yaml", "No such command 'runn'", "Did you mean 'run'?"),
    Provoked("run --nope job.yaml", "No such option: --nope", "kestrl run -h"),
    Provoked("doctor many.yaml", "spec.", "more problems"),
    Provoked("env check raises.yaml", "cannot import 'raises'", "beside the manifest?"),
    Provoked("eval --samples x", "Invalid value for '--samples'", "kestrl eval -h"),
    Provoked("eval", "there is no run in", "start one with `kestrl run JOB.yaml`"),
    Provoked("export nope --out adapter", "no run 'nope' in", "there are: none"),
    Provoked("serve nope", "no run 'nope' in"),
    Provoked("push nope --to x", "Invalid value for '--to'", "'mlflow', 'wandb', 'hf'"),
    Provoked("push nope", "Missing option '--to'", "mlflow, wandb, hf"),
    Provoked("compare a b", "no run 'a' in"),
    Provoked("engine install foo", "ENGINE: 'foo' cannot be installed", "write vllm or"),
    Provoked("sft job.yaml", "kind: is AgentRLJob", "for `kestrl run`"),
    Provoked("data gsm8k --out x.jsonl", "Missing option '--source'", "kestrl data gsm8k -h"),
    Provoked("data arithmetic --out nowhere/x.txt", "--out: "),
    Provoked("email questions nowhere.db --out x.jsonl", "name one source of questions", "--model NAME"),
    Provoked("new /proc/x", "No such file or directory", "the whole text: ", 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("provoked")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("provoked", PROVOKED, ids=[provoked.command for provoked in PROVOKED])
def test_a_failure_is_six_lines_with_the_cause_first_and_the_fix(folder: Path, provoked: Provoked) -> None:
    ended = kestrl(folder, *provoked.command.split())
    lines = ended.stderr.splitlines()
    assert (ended.returncode, len(lines) <= MOST_LINES) == (provoked.code, True), ended.stderr
    assert lines[0].startswith("error: "), ended.stderr
    assert provoked.cause in lines[0], ended.stderr
    assert provoked.fix in ended.stderr
    assert not [line for line in lines if len(line) > LONGEST_LINE + len("error: ") or line[:1] in "│╭╰"]
    for line in lines[:-1]:
        assert not line.startswith("the whole text: ")


def test_the_whole_text_of_a_long_failure_is_in_the_file_that_its_last_line_names(folder: Path) -> None:
    last = kestrl(folder, "validate", "raises.yaml").stderr.splitlines()[-1]
    text = Path(last.removeprefix("the whole text: ")).read_text()
    assert text.startswith("spec.rewards[0].rule: cannot import 'raises': RuntimeError: the cause\ndetail 0\n")
    assert "detail 39. Is it installed" in text
    assert "Traceback (most recent call last)" in text


def test_the_unusable_job_of_doctor_is_six_lines(folder: Path) -> None:
    ended = kestrl(folder, "doctor", "raises.yaml")
    lines = ended.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("MISSING job"))
    assert "cannot import 'raises'" in lines[start + 1]
    assert len(lines[start + 1 :]) <= MOST_LINES
    assert all(line.startswith(" " * 21) for line in lines[start + 1 :])


def test_a_terminal_shows_the_lines_of_a_pipe(folder: Path) -> None:
    """A terminal wraps by itself; what is sent has no breaks of ours, at any width."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "kestrl._app.cli.main", "validate", "nowhere-with-a-long-name-" * 5 + ".yaml"]
    variables = {**os.environ, "COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"}
    ended = subprocess.run(command, cwd=folder, env=variables, stderr=secondary, stdout=secondary, check=False)
    os.close(secondary)
    shown = os.read(primary, 65_536).decode()
    os.close(primary)
    assert (ended.returncode, len(shown.splitlines())) == (2, 1), shown


def test_a_fault_of_our_own_is_named_and_kept_with_its_traceback(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from kestrl._app.cli import main\n"
        "def broken(**_): raise RuntimeError('a fault')\n"
        "main.app = broken\nmain.main()"
    )
    variables = {**os.environ, VARIABLE: str(tmp_path / "errors")}
    ended = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[0], len(lines)) == (1, "error: RuntimeError: a fault", 3), ended.stderr
    assert "in broken\n" in Path(lines[-1].removeprefix("the whole text: ")).read_text()


def test_an_error_that_nobody_can_read_keeps_its_exit_code(folder: Path) -> None:
    command = [sys.executable, "-m", "kestrl._app.cli.main", "validate", "nowhere.yaml"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=folder, stderr=full, stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(
    ("problems", "lines"),
    [
        (["one"], ["one"]),
        (["one", "two", "three", "four"], ["one", "two", "three", "four"]),
        (["one", "two", "three", "four", "five"], ["one", "two", "three", "... and 2 more problems"]),
        (["one\n1\n2\n3\n4", "two"], ["one ... 4", "two"]),
        (["cause\n1\n2\n3\nfix"], ["cause", "1", "... (2 more lines)", "fix"]),
    ],
)
def test_lines_of_problems(problems: Sequence[str], lines: Sequence[str]) -> None:
    assert abridged(problems, 4) == lines


def test_the_middle_of_a_long_line_is_left_out() -> None:
    (line,) = abridged(["cause " + "x" * 1000 + " fix"], 6)
    assert (line[:6], line[-4:], len(line) <= LONGEST_LINE) == ("cause ", " fix", True)


def test_few_texts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    *_, last = [error_lines(UserInputError(f"{number}\n" * 10))[-1] for number in range(MOST_KEPT + 3)]
    assert len([*tmp_path.iterdir()]) == MOST_KEPT
    assert Path(last.removeprefix("the whole text: ")).read_text().startswith(f"{MOST_KEPT + 2}\n")


def test_nothing_is_lost_where_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "folder"))
    texts = [f"problem {number}" for number in range(10)]
    assert error_lines(SeveralProblems(texts)) == texts
    lines = error_lines(RuntimeError("a fault"), keep=True)
    assert (lines[0], lines[-1]) == ("a fault", "RuntimeError: a fault"), "its traceback is printed"
