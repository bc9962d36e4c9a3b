"""Other programs read the table as it is: the examples of docs/episodes.md, each in its environment (`make agents`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kestrl.episode import Group, Purpose, Scenario
from kestrl.errors import Boundary, Failure
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup
from kestrl.testing.attempts import make_attempt

PAGE = (Path(__file__).parents[3] / "docs" / "episodes.md").read_text()
EXAMPLES = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ENVIRONMENTS = "KESTRL_CLIENT_ENVIRONMENTS"


def example(library: str) -> str:
    """The example of the page that imports a library."""
    (found,) = [text for text in EXAMPLES if re.match(rf"(?:import|from) {library}\b", text)]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with two steps: in each an episode that was trained on, a failed one and a group without any."""
    scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "How many?"}], ground_truth=2)
    failure = Failure(boundary=Boundary.TOOL, code="tool_raised", message="it raised")
    episodes = ObjectEpisodeStore(open_store(str(tmp_path)), "run-1")
    for step in (1, 2):
        made = replace(make_attempt("two").episode, reward=0.5 * step, group_id=f"g{step}", scenario_id="s")
        failed = replace(made, id=f"{made.id}-failed", index=1, reward=None, failure=failure)
        stored = [
            StoredGroup(group=Group(id=f"g{step}", scenario=scenario, episodes=[made]), outcome=GroupOutcome.TRAINED),
            StoredGroup(
                group=Group(id=f"h{step}", scenario=scenario, episodes=[failed]),
                outcome=GroupOutcome.RETRIED,
                reason="tool/tool_raised",
            ),
            StoredGroup(
                group=Group(id=f"i{step}", scenario=scenario, episodes=[]),
                outcome=GroupOutcome.RETRIED,
                failure=replace(failure, boundary=Boundary.INFRASTRUCTURE),
            ),
        ]
        episodes.append(EpisodeBatch(purpose=Purpose.TRAIN, step=step, stored=stored))
    return tmp_path


def run(python: Path | str, program: str, folder: Path) -> str:
    """What a program prints in a folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [python, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_duckdb_reads_the_files(folder: Path) -> None:
    printed = run(sys.executable, example("duckdb"), folder)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    for step in "12":
        assert [step, "retried", "infrastructure", "1"] in rows
        assert [step, "retried", "tool", "1"] in rows
        assert [step, "trained", "NULL", "1"] in rows


@pytest.mark.agents
@pytest.mark.timeout(180)
@pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents")
@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("pandas", [r"1 +0\.50? +2", r"2 +1\.00? +2"]),
        ("polars", [r"│ 1 +┆ \S+ +┆ 1 ", r"│ 2 +┆ \S+ +┆ 1 "]),
        ("datasets", [r"'role': 'assistant'", r"'content': '"]),
    ],
)
def test_a_library_reads_the_files(folder: Path, library: str, expected: list[str]) -> None:
    printed = run(Path(os.environ[ENVIRONMENTS]) / "readers" / "bin" / "python", example(library), folder)
    for pattern in expected:
        assert re.search(pattern, printed), printed


@pytest.mark.agents
@pytest.mark.timeout(180)
@pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents")
def test_a_row_keeps_its_tokens_in_datasets(folder: Path) -> None:
    program = (
        "from datasets import load_dataset\n"
        "rows = load_dataset('parquet', data_files='episodes/train/*.parquet', split='train')\n"
        "row = rows[0]['rows'][0]\n"
        "print(sum(row['mask']), len(row['token_ids']), len(row['logprobs']), rows[0]['rewards'])"
    )
    printed = run(Path(os.environ[ENVIRONMENTS]) / "readers" / "bin" / "python", program, folder)
    row = make_attempt("two").episode.rows[0]
    assert printed.split()[:3] == [str(sum(row.mask)), str(len(row.token_ids)), str(len(row.logprobs))]
