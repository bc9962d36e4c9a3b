"""The judge over the wire, with real reward processes: what breaks is typed, never a number."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl.api.common.v1 import common_pb2
from kestrl.episode import Group
from kestrl.episode.codec import failure_from_proto, group_to_proto
from kestrl.errors import Boundary, Failure, FailureError, UserInputError
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.process import ProcessParameters, RewardProcess
from kestrl_judge.service import run_judge


def rule(name: str, *, weight: float = 1.0, seconds: float = 20.0) -> RewardEntry:
    path = name if name in ("exact_answer", "flexible_answer", "format") else f"reward_samples:{name}"
    return RewardEntry(name=name, rule=path, weight=weight, seconds=seconds)


def failure(message: common_pb2.Failure) -> tuple[Boundary, str]:
    read = failure_from_proto(message)
    return read.boundary, read.code


async def test_components_are_weighted_and_named(judge: Any, group: Callable[..., Group]) -> None:
    rules = (rule("length", weight=0.1), rule("thoughtful", weight=2), rule("exact_answer"))
    async with judge(*rules) as client:
        scores = await client.score(group("Paris", "Rome", ground_truth="Paris"))
    assert [score.episode_id for score in scores] == ["group/0", "group/1"]
    assert [round(score.reward, 6) for score in scores] == [2.5, 1.4]
    assert dict(scores[0].rewards) == {"length": 5.0, "thoughtful": 0.5, "exact_answer": 1.0}
    assert dict(scores[1].metrics) == {"turns": 5.0, "long": 1.0, "answer_correct": 0.0}
    assert [score.answer for score in scores] == ["paris", "rome"], "of the only rule that reads one"
    assert not scores[0].HasField("failure")


async def test_turn_rewards_reach_the_caller_in_turn_order(judge: Any, group: Callable[..., Group]) -> None:
    async with judge(rule("per_turn", weight=0.5), rule("length")) as client:
        scores = await client.score(group("Paris"))
    assert list(scores[0].turn_rewards) == [2.5]
    assert scores[0].reward == 7.5
    assert not scores[0].HasField("answer")
    assert dict(scores[0].rewards) == {"per_turn": 5.0, "length": 5.0}


BROKEN: list[tuple[str, tuple[Boundary, str], str]] = [
    ("raise", (Boundary.USER_CODE, "reward_raised"), "scripted: KeyError: 'lost'"),
    ("raise badly", (Boundary.USER_CODE, "reward_raised"), "scripted: ValueError: ?"),
    ("exit", (Boundary.USER_CODE, "reward_raised"), "scripted: SystemExit: 0"),
    ("interrupt", (Boundary.USER_CODE, "reward_raised"), "scripted: KeyboardInterrupt"),
    ("generator", (Boundary.USER_CODE, "reward_raised"), "scripted: GeneratorExit: closed"),
    ("group", (Boundary.USER_CODE, "reward_raised"), "scripted: BaseExceptionGroup: both (2 sub-exceptions)"),
    ("own", (Boundary.USER_CODE, "reward_raised"), "scripted: Own: base"),
    ("mute", (Boundary.USER_CODE, "reward_raised"), "scripted: Mute: (its __str__ raised KeyboardInterrupt)"),
    ("bad value", (Boundary.USER_CODE, "reward_raised"), "scripted: Own: no float"),
    ("die", (Boundary.JUDGE, "reward_process_died"), "scripted: its process ended while scoring (exit code 7)"),
    (
        "flood",
        (Boundary.JUDGE, "reward_process_died"),
        "scripted: its process sent a message of 4294967295 bytes; at most 67108864 are read",
    ),
    ("nan", (Boundary.JUDGE, "reward_not_finite"), "scripted: its value is nan"),
    ("infinite", (Boundary.JUDGE, "reward_not_finite"), "scripted: its value is inf"),
    ("huge", (Boundary.JUDGE, "reward_not_finite"), "scripted: its value is inf"),
    ("text", (Boundary.JUDGE, "reward_not_a_number"), "scripted: its value is '1.0' (str)"),
    ("bool", (Boundary.JUDGE, "reward_not_a_number"), "scripted: its value is True (bool)"),
    ("none", (Boundary.JUDGE, "reward_not_a_number"), "scripted: its value is None"),
]


async def test_a_failure_is_typed_and_only_its_episodes(judge: Any) -> None:
    texts = [text for text, _, _ in BROKEN]
    async with judge(rule("scripted"), rule("length")) as client:
        scores = await client.scripted("ok", *texts, "fraction")
    assert (scores[0].reward, scores[-1].reward) == (2.0, 8.25)
    for score, (text, expected, message) in zip(scores[1:-1], BROKEN, strict=True):
        assert not score.HasField("reward")
        assert failure(score.failure) == expected
        assert score.failure.message.startswith(message)
        assert score.failure.component == "judge-0"
        assert dict(score.rewards) == {"length": float(len(text))}


async def test_no_metric_decides_whether_an_episode_counts(judge: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async with judge(rule("scripted")) as client:
        scores = await client.scripted("metric", "name", "names", "name", "ok")
    assert [score.HasField("reward") for score in scores] == [True] * 5
    assert [score.metrics.get("metrics_left_out", 0.0) for score in scores] == [1.0, 1.0, 9_000.0, 1.0, 0.0]
    logged = capfd.readouterr().err
    assert 1 <= logged.count("warning: scripted: the metric ") <= 4  # one for each process
    assert "it is left out, and counted in metrics_left_out" in logged


async def test_a_malformed_episode_is_a_failure_and_costs_no_process(judge: Any, group: Callable[..., Group]) -> None:
    attempts = group("count", "count", "count")
    unknown: Any = "of a later version"
    episodes = [attempts.episodes[0], replace(attempts.episodes[1], stop_reason=unknown), attempts.episodes[2]]
    async with judge(rule("scripted")) as client:
        scores = await client.score(replace(attempts, episodes=episodes))
    assert failure(scores[1].failure) == (Boundary.JUDGE, "malformed_episode")
    assert "of a later version" in scores[1].failure.message
    assert [scores[0].reward, scores[2].reward] == [1.0, 2.0], "calls of one process"


async def test_bytes_that_cannot_be_decoded_are_a_failure_and_cost_no_process(group: Callable[..., Group]) -> None:
    parameters = ProcessParameters(name="format", rule="format", field="rewards", python_path=(), config={})
    encoded = EncodedGroup(group_to_proto(group("Paris")).SerializeToString())
    process = await RewardProcess.start(parameters)
    try:
        score = await process.ask([b"\x0a\x02\xff\xff"], seconds=20)
        assert failure(score.failure) == (Boundary.JUDGE, "malformed_episode")
        score = await process.ask(encoded.request(encoded.episodes[0]), seconds=20)
        assert score.HasField("reward")
    finally:
        await process.kill()


async def test_output_of_a_reward_is_not_part_of_the_answer(judge: Any) -> None:
    async with judge(rule("scripted")) as client:
        scores = await client.scripted("print", "fraction")
    assert [score.reward for score in scores] == [1.0, 0.25]


async def test_a_reward_never_sees_the_judges_credential(judge: Any) -> None:
    async with judge(rule("scripted")) as client:
        assert (await client.scripted("token"))[0].reward == 0.0


@pytest.mark.parametrize("how", ["hang", "detach"])
async def test_a_late_reward_is_killed_with_its_descendants_and_replaced(judge: Any, tmp_path: Path, how: str) -> None:
    file = tmp_path / "pid"
    async with judge(rule("scripted", seconds=2.0)) as client:
        late, counted = await client.scripted(f"{how} with {file}", "count")
    assert not running(int(file.read_text()))
    assert not late.HasField("reward")
    assert failure(late.failure) == (Boundary.JUDGE, "reward_deadline")
    assert late.failure.message == "scripted: no score within its time limit of 2 s for one episode (rewards[].timeout)"
    assert counted.reward == 1.0  # a new process


async def test_config_is_given_to_the_reward(judge: Any) -> None:
    entry = RewardEntry(name="bounded", rule="reward_samples:bounded", config={"limits": [1, 3], "scale": 2.0})
    async with judge(entry) as client:
        scores = await client.scripted("", "12345")
    assert [score.reward for score in scores] == [2.0, 6.0]


@pytest.mark.parametrize("config", [{"limits": [1, 3], "sale": 2.0}, {"scale": 2.0}, {"attempt": 1, "limits": [1, 3]}])
async def test_config_that_does_not_fit_is_refused_by_field(settings: Any, config: dict[str, Any]) -> None:
    entry = RewardEntry(name="bounded", rule="reward_samples:bounded", config=config)
    with pytest.raises(UserInputError, match=r"^spec\.rewards\[0\]\.config: does not fit reward_samples:bounded: "):
        await run_judge(settings(entry))


async def test_the_loops_reward_is_a_component(judge: Any, group: Callable[..., Group]) -> None:
    attempts = group("a", "b")
    returned = [
        replace(episode, loop_reward=value) for episode, value in zip(attempts.episodes, (0.25, None), strict=True)
    ]
    async with judge(RewardEntry(name="loop_reward", rule="loop_reward", weight=2.0)) as client:
        scored, failed = await client.score(replace(attempts, episodes=returned))
    assert (scored.reward, dict(scored.rewards)) == (0.5, {"loop_reward": 0.25})
    assert not failed.HasField("reward")
    assert failure(failed.failure) == (Boundary.JUDGE, "reward_raised")
    assert "returned no reward" in failed.failure.message


async def test_a_process_keeps_what_it_loaded_from_one_episode_to_the_next(judge: Any) -> None:
    async with judge(rule("scripted")) as client:
        assert [score.reward for score in await client.scripted("count", "count", "count")] == [1.0, 2.0, 3.0]


async def test_a_process_that_died_while_idle_costs_no_episode(judge: Any, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with judge(rule("scripted")) as client:
        assert (await client.scripted(f"pid {file}"))[0].reward == 1.0
        first = int(file.read_text())
        worker = os.pidfd_open(first)
        os.kill(first, signal.SIGKILL)
        await ended(worker)
        assert (await client.scripted(f"pid {file}"))[0].reward == 1.0
        assert int(file.read_text()) != first


async def test_several_processes_share_the_work(judge: Any, tmp_path: Path) -> None:
    async with judge(rule("scripted", seconds=1.0), processes=2) as client:
        hanging = asyncio.create_task(client.scripted("hang"))
        # One process hangs; the other goes on.
        assert [score.reward for score in await client.scripted("fraction", "fraction")] == [0.25, 0.25]
        assert failure((await hanging)[0].failure) == (Boundary.JUDGE, "reward_deadline")


async def test_a_built_in_that_raises_is_the_judges_failure(judge: Any, group: Callable[..., Group]) -> None:
    async with judge(rule("flexible_answer")) as client:
        scores = await client.score(group("72"))
    assert failure(scores[0].failure) == (Boundary.JUDGE, "reward_raised")
    assert "the row has no ground_truth to compare with" in scores[0].failure.message


async def test_failed_episodes_are_not_scored(judge: Any, group: Callable[..., Group]) -> None:
    whole = group("x", "yy")
    broken = Failure(boundary=Boundary.ENGINE, code="engine_failed", message="gone")
    with_failure = replace(whole, episodes=[replace(whole.episodes[0], failure=broken), whole.episodes[1]])
    async with judge(rule("length")) as client:
        scores = await client.score(with_failure)
    assert [(score.episode_id, score.reward) for score in scores] == [("group/1", 2.0)]


async def test_a_caller_that_gave_up_leaves_the_judge_as_it_was(judge: Any, group: Callable[..., Group]) -> None:
    async with judge(rule("scripted", seconds=2.0)) as client:
        with pytest.raises(FailureError) as caught:
            await client.score(group("hang", "hang", "hang"), timeout=0.2)
        assert caught.value.code == "deadline_exceeded"
        assert (await client.scripted("count"))[0].reward == 1.0


@pytest.mark.parametrize(
    ("rules", "messages"),
    [
        (["absent"], ["spec.rewards[0].rule: module 'reward_samples' has no 'absent'"]),
        (["bounded"], ["spec.rewards[0].config: does not fit reward_samples:bounded: missing a required argument"]),
        (
            ["takes_nothing"],
            ["spec.rewards[0].rule: reward_samples:takes_nothing must take the attempt as its first argument"],
        ),
        (
            ["length", "constant", "absent"],
            ["spec.rewards[1].rule: reward_samples:constant is a float", "spec.rewards[2].rule: module"],
        ),
    ],
)
async def test_a_reward_that_cannot_be_loaded_is_reported_by_field(
    settings: Any, rules: list[str], messages: list[str]
) -> None:
    with pytest.raises(UserInputError) as caught:
        await run_judge(settings(*(rule(name) for name in rules)))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(start) for line, start in zip(lines, messages, strict=True))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_running_service_kills_late_rewards(tmp_path: Path, settings: Any, connect: Any) -> None:
    with spawn(tmp_path, settings, rule("scripted", seconds=2.0), rule("length")) as judge:
        listen = json.loads((tmp_path / "settings.json").read_text())["listen"]
        async with connect(listen) as client:
            late, counted = await client.scripted("hang", "count")
        judge.terminate()
        _, log = await asyncio.to_thread(judge.communicate, timeout=20)
    assert late.failure.code == "reward_deadline"
    assert (counted.failure.message, counted.reward) == ("", 6.0)
    assert judge.returncode == 0
    assert "Traceback" not in log


def spawn(tmp_path: Path, settings: Any, *rewards: RewardEntry) -> subprocess.Popen[str]:
    (tmp_path / "settings.json").write_text(settings(*rewards).model_dump_json())
    command = [sys.executable, "-m", "kestrl_judge", "--settings", str(tmp_path / "settings.json")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_the_process_prints_one_line_and_exits_2(tmp_path: Path, settings: Any) -> None:
    with spawn(tmp_path, settings, rule("absent")) as judge:
        _, errors = judge.communicate(timeout=30)
    assert judge.returncode == 2
    assert errors == "error: spec.rewards[0].rule: module 'reward_samples' has no 'absent'\n"


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_reward_processes_end_with_the_judge(tmp_path: Path, settings: Any, how: signal.Signals) -> None:
    with spawn(tmp_path, settings, rule("length"), rule("scripted")) as judge:
        assert judge.stderr is not None
        while "serves on" not in judge.stderr.readline():
            assert judge.poll() is None
        workers = [os.pidfd_open(child) for child in children(judge.pid)]
        assert len(workers) == 2
        judge.send_signal(how)
        judge.wait(timeout=20)
    for worker in workers:
        asyncio.run(ended(worker))


async def ended(process: int) -> None:
    """Waits for the end of a process: its pidfd is readable then."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), timeout=20)
    finally:
        loop.remove_reader(process)
        os.close(process)


def test_the_service_is_light() -> None:
    heavy = ["torch", "transformers", "vllm", "numpy", "kopf", "kubernetes"]
    code = (
        f"import sys, json, kestrl_judge.service, kestrl_judge.worker; print(json.dumps([n "
        f"for n in {heavy} if n in sys.modules]))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(seen.stdout) == []
