"""The commands of docs/retool.md that need no engine, as a reader types them in beside the manifests."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.tasks.arithmetic import rows, transcripts
from kestrl._app.tasks.writing import write_rows
from kestrl._shared.plan.evaluation import evaluation_sampling
from kestrl._shared.spec.load import read_job
from kestrl._shared.spec.sft import read_sft_job
from kestrl.data.conversations import read_conversations
from kestrl.runstate.sampling import EvaluationSampling

pytestmark = pytest.mark.share
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "retool"
TYPED = re.compile(r"^\$ kestrl (.+)$", re.MULTILINE)
WITH_TRAINING = {"sft", "export", "run", "eval"}
STAGES = [
    ("sft.yaml", "rl.yaml"),
    ("qwen2.5-7b-sft.yaml", "qwen2.5-7b-nvidia.yaml"),
    ("qwen3-4b-sft.yaml", "qwen3-4b-ascend.yaml"),
]


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "sft-model"))
    made = rows("train", seed=1, size=80)  # in place of the data sets of a hub
    asked = [{"problem": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]} for row in made]
    write_rows(tmp_path / "ReTool-SFT.parquet", transcripts("train", seed=1, size=20))
    write_rows(tmp_path / "dapo-math-17k.parquet", made)
    write_rows(tmp_path / "aime_2025.jsonl", asked)
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in TYPED.findall((ROOT / "docs" / "retool.md").read_text())]
    checked = [command for command in commands if command[0] not in WITH_TRAINING]
    assert {command[0] for command in checked} == {"data", "validate"}
    printed = ""
    for command in checked:
        done = CliRunner().invoke(app, command)
        assert done.exception is None, (command, done.output, done.exception)
        printed += done.output
    assert printed.count("valid, 80 train scenarios, 80 validation scenarios") == 2
    assert len(read_conversations(tmp_path / "retool-sft.jsonl")) == 20


@pytest.mark.parametrize(("first", "second"), STAGES)
def test_the_second_stage_begins_where_the_first_ends(first: str, second: str) -> None:
    """The base of the second stage is what the page's commands export of the first one."""
    sft, rl = read_sft_job(FOLDER / first), read_job(FOLDER / second)
    exported = f"kestrl export {sft.metadata.name}-sft --merge --out {rl.spec.model.base}"
    assert exported in (ROOT / "docs" / "retool.md").read_text() + (FOLDER / second).read_text()
    assert rl.spec.model.dtype == sft.spec.model.dtype
    (tool,) = rl.spec.tools
    assert (tool.name, tool.use) == ("code_interpreter", "kestrl_sandbox.tool:PythonInterpreter")


@pytest.mark.parametrize(
    ("second", "shaping", "evaluation"),
    [
        ("qwen2.5-7b-nvidia.yaml", "tool_bonus", EvaluationSampling(samples=30, temperature=1.0, top_p=0.6)),
        ("qwen3-4b-ascend.yaml", "tool_penalty", EvaluationSampling(samples=30, temperature=0.7, top_p=0.8, top_k=20)),
    ],
)
def test_the_settings_are_the_published_ones(second: str, shaping: str, evaluation: EvaluationSampling) -> None:
    """Those of verl's retool/run_qwen2_7b_dapo.sh and sandbox_fusion_tool_config.yaml, and of CANN's evaluation."""
    spec = read_job(FOLDER / second).spec
    algorithm = spec.algorithm
    assert (algorithm.group_size, algorithm.groups_per_step, algorithm.groups_per_step // algorithm.mini_batches) == (
        16,
        64,
        16,
    )
    assert (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual) == (0.2, 0.28, 10.0)
    assert algorithm.kl.coefficient == 0
    assert (spec.agent.max_turns, spec.agent.max_tokens, spec.inference.context_length) == (16, 16384, 2048 + 16384)
    assert spec.tools[0].config == {"seconds": 30, "memory_mb": 1024, "max_sandboxes": 128}
    assert [reward.config for reward in spec.rewards] == [{"shaping": shaping}]
    assert evaluation_sampling(spec) == evaluation
