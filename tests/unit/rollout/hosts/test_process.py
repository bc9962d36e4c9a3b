"""A function of the user's runs episodes in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kestrl.episode import StopReason
from kestrl.errors import Boundary, UserInputError

SYNC = """
import threading
together = threading.Barrier(3, timeout=20)

def agent(row, base_url, key, deadline, depth):
    together.wait()  # a thread for each episode
    said = chat(base_url, key, row["messages"])
    return {"metrics": {"depth": depth}, "reward": 0.25, "info": {"pid": os.getpid(), "expected": row["ground_truth"]}}
"""
ASYNC = """
import asyncio
together = []

async def agent(row, base_url, key, deadline):
    together.append(asyncio.current_task())
    while len(together) < 3:
        await asyncio.sleep(0)
    return {"info": {"pid": os.getpid(), "said": await asyncio.to_thread(chat, base_url, key, row["messages"])}}
"""
CLASS = """
class agent:
    def __init__(self, depth=1):
        self.depth, self.episodes = depth, 0

    def run(self, row, base_url, key, deadline):
        self.episodes += 1
        chat(base_url, key, row["messages"])
        return self.depth
"""


async def test_a_sync_function_runs_episodes_at_once_in_threads_of_one_process(function_stage: Any) -> None:
    stage = await function_stage(SYNC, config={"depth": 3})
    stage.says("42")
    episodes = (await stage.run(size=3)).episodes
    assert [episode.failure for episode in episodes] == [None] * 3
    assert {episode.metrics["depth"] for episode in episodes} == {3}
    assert {episode.loop_reward for episode in episodes} == {0.25}
    (pid,) = {episode.info["pid"] for episode in episodes}
    assert pid != os.getpid()


async def test_an_async_function_runs_episodes_at_once_in_one_loop(function_stage: Any) -> None:
    stage = await function_stage(ASYNC)
    stage.says("42")
    episodes = (await stage.run(size=3)).episodes
    assert [(episode.failure, episode.info["said"]) for episode in episodes] == [(None, "42")] * 3


async def test_a_class_is_constructed_once_with_the_config(function_stage: Any) -> None:
    stage = await function_stage(CLASS, config={"depth": 2})
    stage.says("42")
    assert [episode.loop_reward for episode in (await stage.run(size=2)).episodes] == [2, 2]


RAISES = """
class GraphRecursionError(RecursionError):
    pass

class Own(GraphRecursionError):
    pass

def agent(row, base_url, key, deadline):
    if row["id"] != "s-early":
        chat(base_url, key, row["messages"])
    import threading
    {raises}
"""


@pytest.mark.parametrize(
    ("raises", "code", "message"),
    [
        ("raise KeyError('plan')", "agent_raised", "KeyError: 'plan'"),
        ("sys.exit(3)", "agent_raised", "SystemExit: 3"),
        ("return object()", "agent_result_invalid", "object has no form as JSON"),
        ("return {'score': 1}", "agent_result_invalid", "'score' is none of"),
        ("return float('inf')", "loop_reward_invalid", "inf"),
        ("os.kill(os.getpid(), 9)", "agent_process_ended", "ended with status 137"),
        (r"os.write(int(sys.argv[1]), b'\2\0\0\0[]'); threading.Event().wait()", "agent_process_ended", "ended with"),
        (r"os.write(int(sys.argv[1]), b'\xff' * 4); threading.Event().wait()", "agent_process_ended", "ended with"),
    ],
)
async def test_what_a_function_does_wrong_is_its_failure(
    function_stage: Any, raises: str, code: str, message: str
) -> None:
    stage = await function_stage(RAISES.format(raises=raises))
    stage.says("42")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, code)
    assert message in episode.failure.message
    assert "agent.run functions:agent" in episode.failure.message
    assert episode.reward is None
    assert episode.failure.retryable == (code == "agent_process_ended")


async def test_an_exception_of_a_framework_is_a_stop_and_so_is_one_below_it(function_stage: Any) -> None:
    stage = await function_stage(RAISES.format(raises="raise Own('25 steps')"), stopped_reward=0.0)
    stage.says("42")
    episode = await stage.episode()
    assert (episode.failure, episode.stop_reason, episode.loop_reward) == (None, StopReason.AGENT_LIMIT, 0.0)
    assert episode.metrics["stopped_by.GraphRecursionError"] == 1.0


async def test_a_process_that_ended_is_started_again(function_stage: Any, client_module: Path) -> None:
    stage = await function_stage(
        """
        def agent(row, base_url, key, deadline):
            chat(base_url, key, row["messages"])
            if not os.path.exists("once"):
                open("once", "w").close()
                os._exit(5)
        """
    )
    stage.says("42")
    assert [(await stage.episode()).failure is None for _ in range(2)] == [False, True]


BLOCKING = """
import asyncio, time

def agent(row, base_url, key, deadline):
    chat(base_url, key, row["messages"])
    if row["ground_truth"] == "slow":
        time.sleep(1000)

async def blocking(row, base_url, key, deadline):
    await asyncio.to_thread(chat, base_url, key, row["messages"])
    time.sleep(1000)
"""


async def test_a_function_beyond_the_deadline_is_left_behind(function_stage: Any) -> None:
    from kestrl.episode import Scenario

    stage = await function_stage(BLOCKING)
    stage.says("42")
    slow = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "Go."}], ground_truth="slow")
    episode = await stage.episode(scenario=slow, deadlines={"tool": 0.5, "turn": 1, "episode": 1.5})
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "episode_deadline")
    assert (await stage.episode()).failure is None


async def test_a_function_that_blocks_its_event_loop_costs_the_process(
    function_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl_rollout.hosts.process.CANCEL_SECONDS", 0.5)
    stage = await function_stage(BLOCKING, run="functions:blocking")
    stage.says("42")
    for _ in range(2):
        episode = await stage.episode(deadlines={"tool": 0.5, "turn": 1, "episode": 2})
        assert episode.failure is not None
        assert episode.failure.code == "episode_deadline"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def other(): pass", "cannot be imported: AttributeError"),
        ("def agent(row): pass", "cannot be called with"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", "importing functions:agent ended its process"),
        ("class agent:\n    def __init__(self, needed): pass", "cannot be constructed with its config"),
    ],
)
async def test_a_function_that_cannot_be_used_is_refused_by_field(
    function_stage: Any, source: str, message: str
) -> None:
    with pytest.raises(UserInputError, match=rf"^agent\.run: .*{message}"):
        await function_stage(source)
