"""An agent in pods of its own: the pod's program, without any package, behaves as the host beside a worker does."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.plan.settings.rollout import AgentPodSettings, OutsideAgent
from kestrl._shared.prepare import PrepareSettings, prepare
from kestrl.errors import Boundary

PACKAGES = ("kestrl", "kestrl_rollout")


class Pod:
    """A pod's program with the files of its image."""

    def __init__(self, folder: Path, packages: Path, outside: dict[str, Any], capacity: int) -> None:
        self.url, self.outside = f"http://127.0.0.1:{free_port()}", outside
        values = AgentPodSettings(
            component="agent-0",
            job="job",
            run="job-1",
            listen=self.url.removeprefix("http://"),
            agent=OutsideAgent.model_validate(outside),
            capacity=capacity,
        )
        file = folder / "agent.json"
        file.write_text(values.model_dump_json(), encoding="utf-8")
        program = packages / "kestrl_rollout" / "hosts" / "pod_program.py"
        # Without the packages of this environment.
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(program), "--settings", str(file)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "IMAGE": "mine"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    async def ended(self) -> tuple[int, str]:
        _, errors = await asyncio.to_thread(self.process.communicate)
        return self.process.returncode, errors.decode()


def ends(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as process:
        return bool(select.select([process], [], [], 10)[0])


@pytest.fixture
async def start_pod(client_module: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Pod]]:
    """Starts the program of a pod over `functions.py` and `program.py`."""
    packages, pods = tmp_path / "packages", list[Pod]()
    prepare(PrepareSettings(packages=PACKAGES, packages_target=str(packages)))

    def start(source: str, name: str = "functions", capacity: int = 8, **outside: Any) -> Pod:
        (client_module / f"{name}.py").write_text(f"from client import *\n{textwrap.dedent(source)}", encoding="utf-8")
        pods.append(Pod(client_module, packages, outside, capacity))
        return pods[-1]

    yield start
    for pod in pods:
        pod.process.kill()
        await asyncio.to_thread(pod.process.wait)
        assert pod.process.stderr is not None
        pod.process.stderr.close()


@pytest.fixture
def pod_stage(make_stage: Any) -> Callable[..., Awaitable[Any]]:
    """A stage whose worker has its episodes run by a pod."""

    async def make(pod: Pod, **outside: Any) -> Any:
        return await make_stage(outside={**pod.outside, "pods": pod.url, **outside}, concurrency=8)

    return make


async def test_a_function_runs_in_its_pod(start_pod: Any, pod_stage: Any) -> None:
    pod = start_pod(
        """
        def agent(row, base_url, key, deadline, depth):
            said = chat(base_url, key, row["messages"])
            info = {"image": os.environ["IMAGE"], "depth": depth, "packages": "kestrl" in sys.modules}
            return {"metrics": {"length": len(said)}, "reward": 0.5, "info": info}
        """,
        run="functions:agent",
        config={"depth": 3},
    )
    stage = await pod_stage(pod)
    stage.says("42")
    episode = await stage.episode()
    assert (episode.failure, episode.metrics["length"], episode.loop_reward) == (None, 2, 0.5)
    assert (episode.info["image"], episode.info["depth"], episode.info["packages"]) == ("mine", 3, False)
    (row,) = episode.rows
    assert sum(row.mask) == len(stage.ids("42<|im_end|>"))


async def test_a_functions_ends_are_those_beside_a_worker(start_pod: Any, pod_stage: Any) -> None:
    pod = start_pod(
        """
        class NoPlan(Exception):
            pass

        class MaxTurnsExceeded(Exception):
            pass

        def agent(row, base_url, key, deadline):
            said = chat(base_url, key, row["messages"])
            if said == "odd":
                return {"rewards": 1}
            raise {"known": MaxTurnsExceeded, "own": NoPlan, "other": KeyError}[said](said)
        """,
        run="functions:agent",
    )
    stage = await pod_stage(pod, stops={"functions.NoPlan": "model_behavior"}, stopped_reward=0.0)
    episodes: list[Any] = []
    for said in ("known", "own", "other", "odd"):
        stage.says(said)
        episodes.append(await stage.episode())
    known, own, other, odd = episodes
    assert (known.failure, known.stop_reason) == (None, "agent_limit")
    assert (own.failure, own.stop_reason, own.metrics["stopped_by.NoPlan"]) == (None, "model_behavior", 1)
    assert (other.failure.boundary, other.failure.code) == (Boundary.USER_CODE, "agent_raised")
    assert "agent.run functions:agent: raised KeyError" in other.failure.message
    assert odd.failure.code == "agent_result_invalid"
    assert "'rewards' is none of metrics, reward, info" in odd.failure.message


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("sys.exit(3)", "agent_exited", "agent.command python3: ended with status 3"),
        ("os.kill(os.getpid(), 9)", "agent_killed", "was ended by SIGKILL"),
        ("raise KeyError('plan')", "agent_raised", "KeyError: 'plan'"),
    ],
)
async def test_a_commands_ends_are_those_beside_a_worker(
    start_pod: Any, pod_stage: Any, lines: str, code: str, message: str
) -> None:
    source = f"""
    request = json.load(sys.stdin)
    chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], request["row"]["messages"])
    {lines}
    """
    stage = await pod_stage(start_pod(source, "program", command=["python3", "-S", "program.py"]))
    stage.says("42")
    failure = (await stage.episode()).failure
    assert (failure.boundary, failure.code) == (Boundary.USER_CODE, code)
    assert message in failure.message


async def test_an_episodes_end_kills_what_it_has_started(start_pod: Any, make_stage: Any, tmp_path: Path) -> None:
    source = f"""
    import subprocess
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    request = json.load(sys.stdin)
    chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], request["row"]["messages"])
    child.wait()
    """
    pod = start_pod(source, "program", command=["python3", "-S", "program.py"])
    stage = await make_stage(outside={**pod.outside, "pods": pod.url})
    stage.says("42")
    failure = (await stage.episode(deadlines={"tool": 1, "turn": 2, "episode": 3})).failure
    assert failure.code == "episode_deadline"
    child = int((tmp_path / "pid").read_text())
    assert await asyncio.to_thread(ends, child)


async def test_an_agent_that_cannot_be_imported_ends_the_pod_with_its_field(start_pod: Any) -> None:
    status, errors = await start_pod("", run="functions:missing").ended()
    assert status == 2
    assert "error: agent.run: functions:missing cannot be imported" in errors


async def test_a_pod_that_ends_answers_what_runs(start_pod: Any, pod_stage: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    source = f"""
    def agent(row, base_url, key, deadline):
        said = chat(base_url, key, row["messages"])
        return {{"info": {{"go": open({str(tmp_path / "go")!r}).read()}}}}
    """
    pod = start_pod(source, run="functions:agent")
    stage = await pod_stage(pod)
    stage.says("42")
    episode = asyncio.create_task(stage.episode())
    go = await asyncio.to_thread(os.open, tmp_path / "go", os.O_WRONLY)  # once the agent reads it
    pod.process.send_signal(signal.SIGTERM)
    os.write(go, b"on")
    os.close(go)
    assert (await episode).info == {"go": "on"}
    assert (await pod.ended())[0] == 0


async def test_what_is_no_episode_is_refused(start_pod: Any, pod_stage: Any) -> None:
    pod = start_pod("def agent(row, base_url, key, deadline): ...", run="functions:agent")
    await pod_stage(pod)  # it is loaded
    for request, status in (
        (b"PUT / HTTP/1.1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", b"400"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200"),
    ):
        reader, writer = await asyncio.open_connection(*pod.url.removeprefix("http://").split(":"))
        writer.write(request)
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_a_full_pod_gets_the_episode_again(start_pod: Any, pod_stage: Any) -> None:
    source = """
    def agent(row, base_url, key, deadline):
        chat(base_url, key, row["messages"])
    """
    pod = start_pod(source, capacity=1, run="functions:agent")
    stage = await pod_stage(pod)
    stage.says("42")
    episodes = await asyncio.gather(*(stage.episode() for _ in range(3)))
    assert [episode.failure for episode in episodes] == [None] * 3
    assert [len(episode.rows) for episode in episodes] == [1, 1, 1]
