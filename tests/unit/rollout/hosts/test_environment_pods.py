"""An environment that runs its episodes itself, in pods of its own: the pod's program, without any package but a
stand-in for verifiers, behaves as the process beside a worker does (test_verifiers.py has the real one).
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.plan.settings.rollout import AgentPodSettings, OutsideEnvironment
from kestrl._shared.prepare import PrepareSettings, prepare
from kestrl._shared.spec.environments import NAME
from kestrl.episode import Scenario
from kestrl.errors import Boundary
from kestrl_rollout.hosts.inside.verifiers_host import digest

STAND_IN = {
    "__init__.py": """
        class EvalClientConfig:
            def __init__(self, base_url, api_key_var):
                self.base_url, self.api_key_var = base_url, api_key_var

        class SamplingConfig:
            pass
        """,
    "serve.py": """
        import asyncio, json, os, urllib.request
        from types import SimpleNamespace as Object

        class EnvServer:
            def __init__(self, config, address, max_concurrent):
                assert config["taskset"]["id"] == "words"
                self.address = address

            async def run(self):
                await asyncio.Event().wait()

        class EnvClient:
            def __init__(self, address):
                pass

            async def health(self, timeout):
                return True

            async def run(self, client, model, sampling, task):
                if task["trick"] == "dies":
                    os._exit(3)
                if task["trick"] == "refused":
                    raise RuntimeError("the task is refused")
                asked = json.dumps({"model": model, "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
                headers = {"authorization": f"Bearer {os.environ[client.api_key_var]}"}
                request = urllib.request.Request(f"{client.base_url}/chat/completions", asked, headers)
                answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
                text = answer["choices"][0]["message"]["content"]
                usage = Object(completion_tokens=answer["usage"]["completion_tokens"])
                node = Object(message=Object(content=text, tool_calls=None))
                rewards = {"right": Object(score=text == task["answer"], weight=1.0)}
                trace = Object(
                    ok=True, errors=[], rewards=rewards, metrics={}, stop_condition="", nodes=[node],
                    calls=[Object(node=0, usage=usage)],
                )
                return Object(ok=True, errors=[], traces=[trace])
        """,
    "utils/loaders.py": "def resolve_env_config(config): return config\n",
    "runtimes/subprocess.py": "CACHE_DIR = None\n",
}


def environment(**fields: Any) -> dict[str, Any]:
    return {
        "name": NAME,
        "taskset": "words",
        "config": {"taskset": {"id": "words"}},
        "sessions": 4,
        "wait_seconds": 5,
        "start_seconds": 90,
        **fields,
    }


def row(trick: str = "", answer: str = "lamp") -> Scenario:
    task = {"prompt": "Say lamp.", "answer": answer, "trick": trick}
    return Scenario(id="w-1", ordinal=0, messages=[], metadata={"task": task, "digest": digest(task)})


@dataclass(slots=True)
class Pod:
    """The program of a pod."""

    url: str
    process: Process

    async def end(self) -> None:
        """Ends it as Kubernetes does."""
        if self.process.returncode is None:
            self.process.terminate()
        assert await self.process.wait() == 0


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncGenerator[Pod]:
    """The program of a pod, without the packages of this interpreter."""
    packages, image, url = tmp_path / "packages", tmp_path / "image", f"http://127.0.0.1:{free_port()}"
    prepare(PrepareSettings(packages=("kestrl", "kestrl_rollout"), packages_target=str(packages)))
    for name, source in STAND_IN.items():
        module = image / "verifiers" / "v1" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("if True:\n" + source if source.startswith("\n") else source, encoding="utf-8")
    settings = AgentPodSettings(
        component="agent-0",
        job="job",
        run="job-1",
        listen=url.removeprefix("http://"),
        environment=OutsideEnvironment.model_validate(environment()),
        capacity=4,
    )
    (tmp_path / "agent.json").write_text(settings.model_dump_json(), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", str(packages / "kestrl_rollout" / "hosts" / "pod_program.py")),
        *("--settings", str(tmp_path / "agent.json")),
        cwd=image,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    running = Pod(url, process)
    yield running
    await running.end()
    assert not list((tmp_path / ".cache" / "kestrl" / "verifiers").glob("host-*"))


async def test_a_pod_plays_the_episodes_of_a_worker(pod: Pod, make_stage: Any) -> None:
    stage = await make_stage(environment=environment(pods=pod.url))
    stage.says("lamp")
    group = await stage.run(scenario=row(), size=3)
    for episode in group.episodes:
        assert episode.failure is None
        assert episode.environments[NAME] == {"get_reward": {"right": 1.0}, "get_reward.weights": {"right": 1.0}}
        assert sum(episode.rows[0].mask) == len(stage.ids("lamp<|im_end|>"))


async def test_failures_are_those_beside_a_worker_and_a_server_that_ends_is_replaced(pod: Pod, make_stage: Any) -> None:
    stage = await make_stage(environment=environment(pods=pod.url))
    stage.says("lamp")
    for trick, code in {"refused": "raised", "dies": "process_died"}.items():
        failure = (await stage.episode(scenario=row(trick))).failure
        assert failure is not None
        assert (failure.boundary, failure.code) == (Boundary.ENVIRONMENT, code)
        assert failure.retryable == (code == "process_died")
    assert (await stage.episode(scenario=row())).failure is None


async def test_a_pod_that_is_gone_is_a_failure_that_can_be_retried(
    pod: Pod, make_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrl_rollout.hosts.pods.RECONNECT_SECONDS", 0.0)
    stage = await make_stage(environment=environment(pods=pod.url))
    await pod.end()
    failure = (await stage.episode(scenario=row())).failure
    assert failure is not None
    assert (failure.boundary, failure.code, failure.retryable) == (Boundary.ENVIRONMENT, "unreachable", True)
