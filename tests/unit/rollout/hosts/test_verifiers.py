"""A task set of verifiers plays episodes in its environment server (`make agents`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._app.interpreters.listing import listed_rows
from kestrl._shared.plan.settings.rollout import AgentPodSettings, OutsideEnvironment
from kestrl._shared.prepare import PrepareSettings, prepare
from kestrl._shared.spec.environments import NAME
from kestrl.episode import Scenario, StopReason
from kestrl.errors import Boundary, UserInputError
from kestrl.testing.environment_runs import check_environment_runs
from kestrl_rollout.hosts.host import RunRequest
from kestrl_rollout.hosts.inside.verifiers_host import digest, work_root
from kestrl_rollout.hosts.opening import opened_environment_host
from kestrl_rollout.hosts.process import ProcessHost

DATA = Path(__file__).parents[3] / "data"
ENVIRONMENTS = "KESTRL_CLIENT_ENVIRONMENTS"
PYTHON = os.path.abspath(os.path.join(os.environ.get(ENVIRONMENTS, ""), "verifiers/bin/python"))  # noqa: PTH100, PTH118
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(180),
    pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents"),
]


def row(answer: str = "lamp", **columns: Any) -> Scenario:
    task = {"prompt": f"Say {answer}.", "answer": answer, **columns.pop("task", {})}
    return Scenario(id="w-1", ordinal=0, messages=[], metadata={"task": task, "digest": digest(task), **columns})


def word_environment(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    agent = {"runtime": {"type": "subprocess"}, "max_turns": 3}
    return {
        "name": NAME,
        "taskset": "word-tasks",
        "python": PYTHON,
        "config": {"taskset": {"id": "word-tasks"}, "agent": agent, **(config or {})},
        "sessions": 4,
        "wait_seconds": 5,
        "start_seconds": 90,
        **settings,
    }


@pytest.fixture
def words(make_stage: Any) -> Any:
    """A stage whose environment is `word_tasks`."""

    async def make(config: dict[str, Any] | None = None, **settings: Any) -> Any:
        return await make_stage(environment=word_environment(config, **settings), python_path=(str(DATA),))

    return make


async def test_an_episode_earns_what_the_task_set_says(words: Any) -> None:
    stage = await words()
    stage.says("lamp", "chair")
    group = await stage.run(scenario=row(), size=3)
    for episode in group.episodes:
        assert episode.failure is None
        assert episode.environments[NAME] == {
            "get_reward": {"right": 1.0, "short": 1.0},
            "get_reward.weights": {"right": 1.0, "short": 0.25},
        }
        assert (episode.metrics["characters"], episode.stop_reason) == (4.0, StopReason.ANSWERED)
        assert [turn.text for turn in episode.turns] == ["lamp"]
        assert len(episode.rows) == 1
        assert sum(episode.rows[0].mask) == len(stage.ids("lamp<|im_end|>"))
        assert episode.metrics["sampling_forced.temperature"] == 1  # the job's, whatever the harness asks for


async def test_listed_tasks_are_played(words: Any) -> None:
    wanted = {"taskset": "word-tasks", "settings": {"words": ["lamp", "chair"]}, "size": 1}
    (listed,) = await asyncio.to_thread(listed_rows, PYTHON, wanted, field="TASKSET word-tasks", python_path=(DATA,))
    assert (listed["id"], listed["task"]["prompt"], listed["digest"]) == (
        "word-tasks-0",
        "Say lamp.",
        digest(listed["task"]),
    )
    stage = await words()
    stage.says("lamp")
    scenario = Scenario(
        id=listed["id"], ordinal=0, messages=[], metadata={"task": listed["task"], "digest": listed["digest"]}
    )
    assert (await stage.episode(scenario=scenario)).environments[NAME]["get_reward"]["right"] == 1.0


@pytest.mark.parametrize(
    ("taskset", "settings", "message"),
    [
        ("no-such-tasks", {}, "taskset 'no-such-tasks' not found"),
        ("word-tasks", {"wordz": []}, "wordz"),
    ],
)
def test_tasks_that_cannot_be_listed_are_refused(taskset: str, settings: dict[str, Any], message: str) -> None:
    wanted = {"taskset": taskset, "settings": settings, "size": None}
    with pytest.raises(UserInputError, match=rf"(?s)^TASKSET t: .*{message}"):
        listed_rows(PYTHON, wanted, field="TASKSET t", python_path=(DATA,))


async def test_a_limit_of_the_job_ends_an_episode_that_is_scored(words: Any) -> None:
    stage = await words()
    stage.says("one", "two", "lamp", "four")
    episode = await stage.episode(scenario=row(task={"turns": 5}), sampling={"max_turns": 3})
    assert (episode.failure, episode.stop_reason) == (None, StopReason.MAX_TURNS)
    assert [turn.row for turn in episode.turns] == [0, 0, 0]
    assert episode.environments[NAME]["get_reward"]["right"] == 1.0


@pytest.mark.parametrize(
    ("task", "columns", "code", "message"),
    [
        ({"trick": "reward raises"}, {}, "not_ok", "no such word"),
        ({"trick": "repeats"}, {}, "rows_differ", "it has recorded 2 turns of the model, and 1 were sampled"),
        ({"trick": "dies"}, {}, "process_died", "ended with status 137"),
        ({"turns": 0}, {}, "made_no_call", "without a call"),
        ({"answer": 3}, {}, "raised", "answer"),
        ({}, {"digest": "0"}, "row_changed", "its digest differs"),
        ({}, {"task": None}, "row_invalid", "kestrl data verifiers"),
    ],
)
async def test_a_failure_is_typed_and_never_a_reward(
    words: Any, task: dict[str, Any], columns: dict[str, Any], code: str, message: str
) -> None:
    stage = await words()
    stage.says("lamp")
    scenario = row(task=task)
    scenario.metadata.update(columns)  # type: ignore[attr-defined]
    episode = await stage.episode(scenario=scenario)
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.ENVIRONMENT, code)
    assert message in episode.failure.message
    assert (episode.reward, episode.environments) == (None, {})
    assert episode.failure.retryable == (code == "process_died")
    assert (await stage.episode(scenario=row())).failure is None  # the next one is played, by a new server if need be


async def test_an_episode_beyond_its_deadline_leaves_no_process(words: Any) -> None:
    stage = await words()
    stage.says("lamp")
    deadlines = {"tool": 1, "turn": 2, "episode": 4}
    episode = await stage.episode(scenario=row(task={"trick": "hangs"}), deadlines=deadlines)
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.ENVIRONMENT, "episode_deadline")
    assert (await stage.episode(scenario=row())).failure is None


async def test_episodes_beyond_its_sessions_wait_and_are_refused(words: Any) -> None:
    stage = await words(sessions=1, wait_seconds=0.5)
    stage.says("lamp")
    deadlines = {"tool": 1, "turn": 2, "episode": 6}
    group = await stage.run(scenario=row(task={"trick": "hangs"}), size=2, deadlines=deadlines)
    failures = [episode.failure for episode in group.episodes if episode.failure is not None]
    assert sorted(failure.code for failure in failures) == ["capacity", "episode_deadline"]


def work_folders() -> list[Path]:
    return sorted(work_root().glob("host-*"))


async def test_a_killed_host_leaves_no_work_folder(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    stage = await words()
    stage.says("lamp")
    (first,) = work_folders()
    episode = await stage.episode(scenario=row(task={"trick": "dies"}))
    assert episode.failure is not None
    assert list((first / "runtimes" / "subprocess").iterdir())  # what the killed process has left
    assert (await stage.episode(scenario=row())).failure is None
    assert first not in work_folders()
    assert len(work_folders()) == 1
    assert not (tmp_path / ".cache" / "verifiers" / "runtimes" / "subprocess").exists()


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncGenerator[str]:
    """URL of the program of a pod whose image has `word_tasks` in its working directory, and nothing of KestRL."""
    packages, url = tmp_path / "packages", f"http://127.0.0.1:{free_port()}"
    prepare(PrepareSettings(packages=("kestrl", "kestrl_rollout"), packages_target=str(packages)))
    settings = AgentPodSettings(
        component="agent-0",
        job="job",
        run="job-1",
        listen=url.removeprefix("http://"),
        environment=OutsideEnvironment.model_validate(word_environment(python=None)),
        capacity=4,
    )
    (tmp_path / "agent.json").write_text(settings.model_dump_json(), encoding="utf-8")
    program = packages / "kestrl_rollout" / "hosts" / "pod_program.py"
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(program),
        "--settings",
        str(tmp_path / "agent.json"),
        cwd=DATA,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    yield url
    process.terminate()
    assert await process.wait() == 0
    assert not list((tmp_path / ".cache" / "kestrl" / "verifiers").glob("host-*"))


async def test_a_pod_plays_episodes_as_the_process_beside_a_worker_does(pod: str, make_stage: Any) -> None:
    stage = await make_stage(environment=word_environment(python=None, pods=pod))
    stage.says("lamp")
    (earned,) = (await stage.run(scenario=row(), size=1)).episodes
    assert earned.failure is None
    assert earned.environments[NAME]["get_reward"] == {"right": 1.0, "short": 1.0}
    for trick, code in {"reward raises": "not_ok", "dies": "process_died"}.items():
        failure = (await stage.episode(scenario=row(task={"trick": trick}))).failure
        assert failure is not None
        assert (failure.boundary, failure.code) == (Boundary.ENVIRONMENT, code)
        assert failure.retryable == (code == "process_died")
    assert (await stage.episode(scenario=row())).failure is None


class Adapter:
    """The host of `word_tasks` as the conformance suite has it."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host

    @property
    def pid(self) -> int:
        """The host below its process guard."""
        assert self._host._process is not None
        guard = self._host._process._program.process.pid
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])

    async def run(self, row: Mapping[str, Any], base_url: str, key: str, deadline: float) -> Mapping[str, Any]:
        request = RunRequest(row=row, base_url=base_url, key=key, mcp_url="", deadline=deadline, config={})
        returned = await self._host.run(request)
        if "failed" in returned.info:
            raise RuntimeError(returned.info)
        return {"rewards": returned.info["rewards"], "metrics": returned.metrics}


async def test_it_passes_the_conformance_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = OutsideEnvironment.model_validate(word_environment())

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Adapter]:
        async with opened_environment_host(settings, (str(DATA),)) as host:
            assert isinstance(host, ProcessHost)
            yield Adapter(host)

    await check_environment_runs(
        opened, row={"metadata": row().metadata}, replies=["lamp"], other=["chairs"], left=work_folders
    )


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"taskset": {"id": "no-such-tasks"}}, {}, "taskset 'no-such-tasks' not found"),
        ({"agent": {"max_turn": 3}}, {}, "max_turn"),
        ({}, {"start_seconds": 0.01}, r"within 0\.01 s"),
    ],
)
async def test_an_environment_that_cannot_start_is_refused_by_its_field(
    words: Any, config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserInputError, match=rf"(?s)^environment\.verifiers: .*{message}"):
        await words(config, **settings)
