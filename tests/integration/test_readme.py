"""What the README says, as a person does it: a fresh clone below a path with a space and an umlaut, `make setup`, every
command of its table."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runs import ROOT, belonging_to, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.xdist_group("readme"), pytest.mark.share]
STARTER = "../my job"
JOB = f"'{STARTER}/job.yaml'"
STEPS = ("--set", "schedule.maxSteps=8", "--set", "algorithm.groupsPerStep=2")
"""Enough for a run to be stopped in the middle."""
SETUP_SECONDS = 600.0
LOGGED_BY_THE_ENGINE = "engine-0 |"
"""vLLM itself may log a traceback of its own shutdown, which `kestrl logs` shows."""
KEPT_FOR_OTHERS = {"VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"}


class Person:
    """Someone in a shell in the clone."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.said: set[str] = set()
        plain = {name: value for name, value in os.environ.items() if name not in KEPT_FOR_OTHERS}
        self.environment = plain | {"PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"}

    def types(self, line: str, *, code: int = 0, seconds: float = 600) -> str:
        """Runs a line of shell, and returns all that it printed."""
        command = ["bash", "-c", line]
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
        print(f"{time.monotonic() - began:6.1f} s  {line}")  # noqa: T201 - where the time went, for who reads a failure
        own = [line for line in done.stdout.splitlines() if not line.startswith(LOGGED_BY_THE_ENGINE)]
        assert not any("Traceback" in line for line in own), done.stdout
        assert done.returncode == code, f"{line} ended with {done.returncode}\n{done.stdout}"
        self.said |= set(re.findall(r"kestrl (\w+)", line))
        return done.stdout

    def begins(self, line: str) -> subprocess.Popen[str]:
        """Runs a line of shell beside."""
        self.said |= set(re.findall(r"kestrl (\w+)", line))
        command = ["bash", "-c", f"exec {line}"]
        return subprocess.Popen(
            command, cwd=self.clone, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def step(self, run: str) -> int:
        """Where a run is, by what it wrote."""
        try:
            record = json.loads((self.clone / "runs" / run / "run.json").read_text())
        except FileNotFoundError:
            return 0
        return int(((record.get("state") or {}).get("steps") or {}).get("done", 0))


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person with a fresh clone, set up as the README says."""
    clone = tmp_path_factory.mktemp("readme") / "a b ü" / "kestrl"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=60)
    made = Person(clone)
    made.types("make setup", seconds=SETUP_SECONDS)
    try:
        yield made
    finally:
        shutil.rmtree(clone / ".venv")  # gigabytes, of which pytest would keep three
        shutil.rmtree(clone / ".tools")


def commands_of_the_readme() -> set[str]:
    """The first words after `kestrl` in the table of commands."""
    return set(re.findall(r"^\| `kestrl (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))


def test_the_readme_holds_in_a_path_with_a_space_and_an_umlaut(person: Person) -> None:
    looks_without_a_trace(person)
    stops_and_resumes(person)
    looks_at_the_run(person)
    uses_the_adapter(person)
    fine_tunes(person)
    writes_data(person)
    judges_a_threshold(person)
    assert belonging_to(person.clone) == []
    assert commands_of_the_readme() <= person.said


def looks_without_a_trace(person: Person) -> None:
    """Commands that read, before anything runs: they make nothing."""
    assert "kestrl validate" in person.types(f"kestrl new '{STARTER}'")
    assert "ENGINE: vllm is not installed" in person.types("kestrl engine remove vllm", code=2)
    assert "valid, 10 train scenarios" in person.types(f"kestrl validate {JOB}")
    assert "MISSING" not in person.types(f"kestrl doctor {JOB}")
    assert "learner-0" in person.types(f"kestrl plan {JOB}")
    assert "error: " in person.types("kestrl status", code=2)
    assert person.types("git status --porcelain --ignored").split() == ["!!", ".tools/", "!!", ".venv/"]


def stops_and_resumes(person: Person) -> None:
    """A live run is stopped; the same command again resumes it, and once more begins another."""
    line = f"kestrl run {JOB} {' '.join(STEPS)}"
    live = person.begins(line)

    def in_the_middle() -> bool:
        assert live.poll() is None, live.communicate()[0]
        return person.step("count-stock-1") >= 1

    eventually(in_the_middle, 240)
    assert "count-stock-1 running" in person.types("kestrl status")
    person.types("kestrl stop")
    printed, _ = live.communicate(timeout=240)
    assert live.returncode == 130, printed
    assert "run the same command again to resume count-stock-1" in printed
    assert "count-stock-1 stopped" in person.types("kestrl status")
    printed = person.types(line)
    assert "resuming run count-stock-1" in printed
    assert "8 steps" in printed


def looks_at_the_run(person: Person) -> None:
    assert "count-stock-1 succeeded" in person.types("kestrl status")
    assert "learner-0" in person.types("kestrl logs")
    (first,) = re.findall(r"count-stock-1/[\w/-]+", person.types("kestrl episodes list | head -n 5"))[:1]
    shown = person.types(f"kestrl episodes show {first}")
    assert "reward" in shown
    assert "mask 1  logprob" in person.types(f"kestrl episodes show {first} --tokens")
    person.types("kestrl ui --export page")
    assert "count-stock-1" in (person.clone / "page" / "index.html").read_text()


def fine_tunes(person: Person) -> None:
    """A run starts from an adapter of SFT; the same command again finds it finished."""
    line = f"kestrl sft '{STARTER}/sft.yaml'"
    address = person.types(line).split()[-1]
    assert address.startswith("file:///")
    assert person.types(line).split()[-1] == address
    assert "valid" in person.types(f"kestrl validate {JOB} --set 'model.adapter.from={address}'")


def writes_data(person: Person) -> None:
    assert "problems.jsonl: 20 rows" in person.types("kestrl data word-problems --size 20 --out problems.jsonl")
    assert len((person.clone / "problems.jsonl").read_text().splitlines()) == 20


def judges_a_threshold(person: Person) -> None:
    """SFT, a run from its adapter and a verdict by the evaluations; the same command again repeats none of it."""
    line = "kestrl verify examples/convergence/letters-threshold.yaml"
    printed = person.types(line)
    assert printed.splitlines()[-2:] == ["passed", str(person.clone / "runs" / "verify" / "letters.json")]
    assert "30 steps in" in printed
    again = person.types(line)
    assert "passed" in again
    assert "30 steps in" not in again


def uses_the_adapter(person: Person) -> None:
    """What the report at a run's end offers."""
    held_out = "--set 'data.validation={uri: data.jsonl, size: 4}'"
    printed = person.types(f"kestrl eval {held_out} --samples 2")
    for name in ("held-out, 2 samples", "reward", "num_turns", "best@2"):
        assert name in printed
    person.types("kestrl export --out 'the adapter'")
    assert (person.clone / "the adapter" / "adapter_model.safetensors").is_file()
    person.types("kestrl export --merge --out 'the model'")
    assert (person.clone / "the model" / "model.safetensors").is_file()
