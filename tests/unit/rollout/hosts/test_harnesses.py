"""Coding agents from npm, unchanged and offline, by the scripts of their page (`make harnesses`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kestrl.episode import CallOutcome

PROGRAMS = "KESTRL_HARNESSES"
PAGE = Path(__file__).parents[4] / "docs" / "coding-agents.md"
TASK = "Write the number of lamps into answer.txt."
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROGRAMS not in os.environ, reason=f"{PROGRAMS} names no folder of programs: make harnesses"),
]


def scripts() -> dict[str, str]:
    return dict(re.findall(r"`(\w+\.sh)`:\n\n```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("script", "shell", "arguments", "job_tool"),
    [
        ("claude_code.sh", "Bash", {"command": "echo $((1 + 1))", "description": "Counts"}, "mcp__job__search"),
        ("codex.sh", "exec_command", {"cmd": "echo $((1 + 1))"}, "mcp__job__search"),
        ("opencode.sh", "bash", {"command": "echo $((1 + 1))", "description": "Counts"}, "job_search"),
    ],
)
async def test_a_harness_runs_an_episode(
    make_stage: Any, call_text: Any, tmp_path: Path, script: str, shell: str, arguments: Any, job_tool: str
) -> None:
    (tmp_path / script).write_text(scripts()[script])
    path = f"{os.environ[PROGRAMS]}:{os.environ['PATH']}"
    stage = await make_stage(
        outside={"command": ["bash", script], "env": {"PATH": path, "NO_PROXY": "127.0.0.1"}},
        python_path=(str(tmp_path),),
        context_length=200_000,
    )
    calls = [call_text(shell, **arguments), call_text(job_tool, word="lamp")]
    stage.says(*calls, "There are 2.")
    episode = await stage.episode(
        messages=[{"role": "user", "content": TASK}],
        sampling={"max_tokens": 20_000, "max_turns": 12},
        deadlines={"turn": 100, "episode": 150, "group": 160},
    )
    assert episode.failure is None, (episode.failure, episode.metrics)
    assert episode.stop_reason == "answered"
    assert episode.final_text == "There are 2."
    assert TASK in str(episode.messages)
    main = [turn for turn in episode.turns if turn.row == episode.main_row]
    assert len(main) == len(calls) + 1  # one row: what the harness sent back was what was sampled
    shown = {call.name: call for call in episode.tool_calls if call.turn in {turn.index for turn in main}}
    assert shown[shell].outcome is CallOutcome.OK
    assert "2" in shown[shell].text
    assert (shown["search"].outcome, shown["search"].arguments) == (CallOutcome.OK, {"word": "lamp"})
    assert "found lamp" in shown["search"].text
    assert [call.name for call in stage.tools.calls] == ["search"]
    assert not any(name.startswith("refused.") for name in episode.metrics), episode.metrics
