"""Programs that run an episode each: what they get, what they return, and how they end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Fault

from kestrl.episode import StopReason
from kestrl.errors import Boundary, UserInputError


async def test_a_program_runs_an_episode(program_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_ROLLOUT_TO_JUDGE_TOKEN", "credential")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "credential")
    stage = await program_stage(
        """
        secret = [name for name, value in os.environ.items() if value == "credential"]
        print("thinking about", said)
        row = request["row"]
        info = {"said": said, "expected": row["ground_truth"], "id": row["id"], "secret": secret,
                "mine": os.environ["MINE"], "config": request["config"], "keys": sorted(request)}
        print(json.dumps({"metrics": {"length": len(said)}, "reward": 0.5, "info": info}))
        """,
        config={"depth": 2},
        env={"MINE": "yes"},
    )
    stage.says("42")
    episode = await stage.episode()
    assert episode.failure is None
    assert (episode.metrics["length"], episode.loop_reward, episode.stop_reason) == (2, 0.5, StopReason.ANSWERED)
    assert episode.info == {
        "said": "42",
        "expected": "42",
        "id": "s-1",
        "secret": [],
        "mine": "yes",
        "config": {"depth": 2},
        "keys": ["base_url", "config", "deadline", "key", "mcp_url", "row"],
    }
    (row,) = episode.rows
    assert sum(row.mask) == len(stage.ids("42<|im_end|>"))
    assert stage.chat_model.vocabulary.decode(row.token_ids).endswith("42<|im_end|>")
    assert episode.reward == 0.0  # the judge's: the index of the episode


async def test_a_result_may_be_in_a_file_and_nothing_is_needed(program_stage: Any) -> None:
    stage = await program_stage('open(os.environ["KESTRL_RESULT"], "w").write("1.5")\nprint("{not the result")')
    stage.says("42")
    assert (await stage.episode()).loop_reward == 1.5


async def test_output_that_is_no_result_is_none(program_stage: Any) -> None:
    stage = await program_stage('print("The answer is", said)')
    stage.says("42")
    episode = await stage.episode()
    assert (episode.failure, episode.loop_reward, episode.info) == (None, None, {})


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("raise KeyError('plan')", "agent_raised", "KeyError: 'plan'"),
        ("sys.exit(3)", "agent_exited", "status 3"),
        ("os.kill(os.getpid(), 9)", "agent_killed", "SIGKILL"),
        ("print('{half')", "agent_result_invalid", "not JSON"),
        ("print(json.dumps({'rewards': 1}))", "agent_result_invalid", "'rewards' is none of metrics, reward, info"),
        ("print(json.dumps({'info': [1]}))", "agent_result_invalid", "info is a list, not a mapping"),
        ("print(json.dumps({'info': {'text': 'x' * 300_000}}))", "agent_result_invalid", "at most 262144 are kept"),
        ("print('{\"reward\": \"' + 'x' * 5_000_000 + '\"}')", "agent_result_invalid", "more than 4194304 bytes"),
        ("print(json.dumps({'reward': 'high'}))", "loop_reward_invalid", "'high'"),
        ("print('{\"reward\": NaN}')", "loop_reward_invalid", "nan"),
        ("print(json.dumps({'error': {'type': 'Mine', 'message': 'no'}}))", "agent_raised", "Mine: no"),
    ],
)
async def test_what_a_program_does_wrong_is_its_failure(
    program_stage: Any, lines: str, code: str, message: str
) -> None:
    stage = await program_stage(lines)
    stage.says("42")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, code)
    assert message in episode.failure.message
    assert "agent.command python" in episode.failure.message
    assert (episode.reward, episode.stop_reason, episode.loop_reward) == (None, StopReason.FAILED, None)


async def test_a_program_that_does_not_exist_is_named(make_stage: Any) -> None:
    with pytest.raises(UserInputError, match=r"agent\.command: there is no program 'no-such-agent'; install it"):
        await make_stage(outside={"command": ["no-such-agent"]})


async def test_a_program_that_is_gone_is_a_failure(make_stage: Any, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\n", encoding="utf-8")
    agent.chmod(0o755)
    stage = await make_stage(outside={"command": ["./agent"]}, python_path=(str(tmp_path),))
    agent.unlink()
    episode = await stage.episode()
    assert episode.failure is not None
    assert episode.failure.code == "agent_not_started"
    assert "cannot start ./agent" in episode.failure.message


async def test_a_run_without_a_call_is_no_episode(make_stage: Any) -> None:
    stage = await make_stage(outside={"command": ["true"]})
    episode = await stage.episode()
    assert episode.failure is not None
    assert episode.failure.code == "agent_made_no_call"


STOPS = [
    ("class GraphRecursionError(RecursionError): pass\nraise GraphRecursionError('25\\nsteps')", "agent_limit",
     "GraphRecursionError"),
    ("class NoPlan(Exception): pass\nraise NoPlan", "model_behavior", "NoPlan"),
    ("sys.exit(7)", "agent_limit", "exit:7"),
    ("print(json.dumps({'error': {'type': 'agents.exceptions.ModelBehaviorError'}})); sys.exit(1)", "model_behavior",
     "ModelBehaviorError"),
    ("print(json.dumps({'error': {'type': 'MaxTurnsExceeded'}}))", "agent_limit", "MaxTurnsExceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "reason", "name"), STOPS)
async def test_a_limit_or_a_mistake_of_the_model_is_scored(
    program_stage: Any, lines: str, reason: str, name: str
) -> None:
    stops = {"NoPlan": "model_behavior", "exit:7": "agent_limit"}
    stage = await program_stage(lines, stops=stops, stopped_reward=-1.0)
    stage.says("42")
    episode = await stage.episode()
    assert (episode.failure, episode.stop_reason, episode.loop_reward) == (None, reason, -1.0)
    assert episode.metrics[f"stopped_by.{name}"] == 1.0
    assert episode.reward is not None


async def test_a_call_refused_at_the_episodes_limit_stops_it(program_stage: Any) -> None:
    lines = 'messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]\n'
    lines += "chat(request['base_url'], request['key'], messages)"
    stage = await program_stage(lines)
    stage.says("42")
    episode = await stage.episode(sampling={"max_turns": 1})
    assert (episode.failure, episode.stop_reason) == (None, StopReason.MAX_TURNS)
    assert episode.metrics["stopped_by.max_turns"] == 1.0


GROWING = "messages[0]['content'] = 'x' * 5_000\nchat(request['base_url'], request['key'], messages)"


async def test_a_prompt_above_the_context_stops_an_episode_that_has_begun(program_stage: Any) -> None:
    stage = await program_stage(GROWING)
    stage.says("42")
    episode = await stage.episode()
    assert (episode.failure, episode.stop_reason) == (None, StopReason.MAX_TOKENS)
    assert episode.metrics["stopped_by.context_length_exceeded"] == 1.0


async def test_a_row_that_is_too_long_is_skipped_as_for_a_loop(program_stage: Any) -> None:
    stage = await program_stage("")
    episode = await stage.episode(messages=[{"role": "user", "content": "x" * 5_000}])
    assert episode.failure is not None
    assert episode.failure.code == "prompt_too_long"


async def test_a_broken_engine_is_not_the_agents_failure(program_stage: Any) -> None:
    stage = await program_stage("raise KeyError")
    stage.says(Fault(status=500))
    episode = await stage.episode()
    assert episode.failure is not None
    assert episode.failure.boundary is Boundary.ENGINE


async def test_the_deadline_ends_a_program_with_all_that_it_started(program_stage: Any, client_module: Any) -> None:
    stage = await program_stage(
        """
        import subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("pids", "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
        """
    )
    stage.says("42")
    episode = await stage.episode(deadlines={"tool": 0.5, "turn": 1, "episode": 2})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "episode_deadline")
    for pid in (client_module / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert not await asyncio.to_thread(list, client_module.glob("kestrl-agent-*"))


ASKING = """
tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
fields = [
    {"response_format": {"type": "json_object"}},
    {"tools": [tool], "tool_choice": "required"},
    {"tools": [tool], "parallel_tool_calls": False},
]
answers = []
for more in fields:
    try:
        chat(request["base_url"], request["key"], messages, **more)
        answers.append("sampled")
    except urllib.error.HTTPError as error:
        problem = json.load(error)["error"]
        answers.append(f"{error.code} {problem['code']} {problem['param']}")
print(json.dumps({"info": {"answers": answers}}))
"""


@pytest.mark.parametrize("refused", [(), ("response_format", "tool_choice")])
async def test_a_job_may_refuse_what_cannot_be_forced(program_stage: Any, refused: tuple[str, ...]) -> None:
    stage = await program_stage(ASKING, settings={"refused_fields": refused})
    stage.says("42")
    episode = await stage.episode()
    assert episode.failure is None
    expected = [
        f"400 not_forced {name}" if name in refused else "sampled" for name in ("response_format", "tool_choice")
    ]
    assert episode.info["answers"] == [*expected, "sampled"]
    assert episode.metrics.get("refused.not_forced", 0) == len(refused)
