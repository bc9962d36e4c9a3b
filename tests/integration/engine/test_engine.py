"""The engine agent on a real vLLM: real adapters, log-probs of transformers and peft, real deaths."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port
from tests.integration.conftest import planned_engine

from kestrl._app.engines.variables import engine_environment
from kestrl._app.local.processes import Launcher
from kestrl._app.local.supervisor import ComponentFailed, Supervisor
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl.engines import Generate
from kestrl.engines.vllm import Vllm
from kestrl.errors import EngineFailure, FailureError
from kestrl.runstate.states import EngineState
from kestrl.testing.engines import check_engine
from kestrl_inference.engine import CONTROL_KEY
from kestrl_rollout.engine.client import Cut, EngineAddress, EngineClient

from .agents import BOUND, Agent, beside

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("engine"),  # all ask the same two
]

DATA, CONTROL = "test-data-key", "test-control-key"
EMBEDDED = {28: ["embed_tokens"], 29: ["embed_tokens", "q_proj", "down_proj"]}


@pytest.fixture
async def agent(servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    monkeypatch.setenv(CONTROL_KEY, CONTROL)
    agent = await beside(servers[0], tmp_path / "adapters")
    yield agent
    await agent.end()


def generate(server: Any, model: str, ids: list[int], key: str = DATA, **sampling: Any) -> tuple[int, Any]:
    body = {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 1, "detokenize": False, **sampling}}
    status, answer = server.ask("POST", "/inference/v1/generate", key=key, body=json.dumps(body).encode())
    return status, json.loads(answer)


def test_two_servers_start_side_by_side(servers: Any) -> None:
    """22 s on two idle cores; how long it may take beside a run that starts two more is the fixture's START_SECONDS."""
    assert [server.ask("GET", "/health")[0] for server in servers] == [200, 200]


def test_a_server_without_the_plugin_does_not_start(tmp_path: Path) -> None:
    planned = planned_engine(tmp_path, tmp_path, free_port())
    command = [planned.python, "-m", planned.module, "--cpu", "--", "--model", "none"]
    environment = {**engine_environment(os.environ, planned.python), **planned.env, "VLLM_PLUGINS": "another"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert "VLLM_PLUGINS='another' leaves it out" in ended.stderr


def test_vllms_dialect_conforms_to_the_real_engine(servers: Any, adapters: Any, tmp_path: Path) -> None:
    for name, content in adapters(5).files.items():
        (tmp_path / name).write_bytes(content)
    url, prompt = servers[1].url, list(range(20, 50))
    check_engine(Vllm(), url, base="base", adapter=str(tmp_path), prompt_ids=prompt, key=CONTROL)


# --- the guard, inside the real server


@pytest.mark.parametrize(
    ("method", "path", "without", "data", "control"),
    [
        ("GET", "/health", 200, 200, 200),
        ("GET", "/metrics", 200, 200, 200),
        ("GET", "/v1/models", 401, 200, 200),
        ("POST", "/v1/load_lora_adapter", 401, 403, 400),
        ("POST", "/v1/unload_lora_adapter", 401, 403, 400),
        ("POST", "/adapters", 401, 403, 400),
        ("DELETE", "/adapters/some", 401, 403, 404),
        ("POST", "/tokenize", 401, 403, 400),
        ("GET", "/openapi.json", 401, 403, 200),
        # vLLM's development mode is off: what would change the weights or stop the engine is not even there.
        ("POST", "/pause", 401, 403, 404),
        ("POST", "/sleep", 401, 403, 404),
        ("POST", "/collective_rpc", 401, 403, 404),
        ("POST", "/reset_prefix_cache", 401, 403, 404),
        ("POST", "/update_weights", 401, 403, 404),
    ],
)
def test_the_control_routes_open_only_to_the_control_key(
    servers: Any, method: str, path: str, without: int, data: int, control: int
) -> None:
    body = b"{}" if method == "POST" else None
    answers = [servers[0].ask(method, path, key=key, body=body)[0] for key in ("", DATA, CONTROL, "wrong")]
    assert answers == [without, data, control, 403 if without == 401 else 200]


def test_sampling_needs_a_key_and_takes_either(servers: Any) -> None:
    assert [generate(servers[0], "base", [60, 61], key)[0] for key in ("", DATA, CONTROL, "wrong")] == [
        401, 200, 200, 403,
    ]  # fmt: skip


# --- a turn that is cut


async def test_a_turn_that_is_cut_had_as_many_tokens_as_the_engine_counted(servers: Any) -> None:
    dialect, cut = Vllm(), None

    def sampled() -> int:
        return dialect.read_metrics(servers[0].ask("GET", "/metrics")[1].decode()).work.sampled_tokens

    async with EngineClient(DATA, dialect) as client:
        for seed in range(20):  # one may end by itself before it is cut
            before, retired = sampled(), asyncio.Event()
            turn = Generate(
                id=f"cut/{seed}/0",
                policy="base",
                prompt_ids=range(20, 60),
                temperature=1.0,
                max_tokens=900,
                seed=seed,
                stop_token_ids=(),
            )
            address = EngineAddress(name="engine-0", url=servers[0].url)
            running = asyncio.create_task(client.generate_unless(retired, address, turn))
            while await asyncio.to_thread(sampled) == before and not running.done():
                pass
            retired.set()
            cut = await running
            if isinstance(cut, Cut):
                break
    assert isinstance(cut, Cut)
    assert cut.tokens == sampled() - before > 0


# --- loading and proving


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "storage"


async def test_a_real_adapter_is_loaded_and_proved_to_float32(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    version = publish(storage, adapters(1))
    loaded = await agent.adapters.load(version.policy, version.uri)
    assert loaded.gap < 5e-5, f"gap {loaded.gap:.2e}"
    assert loaded.gap > 0, "two implementations never agree to the last bit; this compared something with itself"
    assert agent.adapters.proved() == {version.name}
    assert await agent.loaded() == {version.name: str(agent.folder / version.name)}
    fetched = (agent.folder / version.name).stat().st_ctime_ns
    again = await agent.adapters.load(version.policy, version.uri)
    assert again.gap < 5e-5
    assert (agent.folder / version.name).stat().st_ctime_ns == fetched, "it is fetched once"


async def test_the_untouched_adapter_is_proved(agent: Agent, adapters: Any, publish: Any, storage: Path) -> None:
    version = publish(storage, adapters(2, scale=0.0), step=0)
    assert (await agent.adapters.load(version.policy, version.uri)).gap < 5e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_what_is_sampled_has_the_learners_logprobs(
    agent: Agent, adapters: Any, publish: Any, storage: Path, temperature: float
) -> None:
    adapter = adapters(3)
    version = publish(storage, adapter)
    await agent.adapters.load(version.policy, version.uri)
    prompt = list(range(100, 130))
    sampling = {"max_tokens": 64, "temperature": temperature, "seed": 5, "logprobs": 0, "ignore_eos": True}
    status, answer = generate(agent.server, version.name, prompt, **sampling)
    assert (status, answer["model"]) == (200, version.name)
    (choice,) = answer["choices"]
    behaviour = [item["logprob"] for item in choice["logprobs"]["content"]]
    ours = adapter.score([*prompt, *choice["token_ids"]], temperature=temperature)[len(prompt) - 1 :]
    assert len(behaviour) == 64
    assert max(abs(a - b) for a, b in zip(behaviour, ours, strict=True)) < BOUND
    base = adapter.score([*prompt, *choice["token_ids"]], base=True, temperature=temperature)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(behaviour, base, strict=True)) > 0.1, "the adapter has no effect to prove"


async def test_a_probe_is_computed_although_its_prefix_is_cached(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    adapter = adapters(4)
    version = publish(storage, adapter)
    await agent.adapters.load(version.policy, version.uri)
    ids = list(range(60, 160))
    for _ in range(2):
        assert generate(agent.server, version.name, ids)[0] == 200
    scores = await agent.engine.score(version.name, ids)
    assert max(abs(a - b) for a, b in zip(scores, adapter.score(ids), strict=True)) < BOUND


async def test_other_weights_than_the_learner_scored_are_caught(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    version = publish(storage, adapters(5), probed=adapters(6))
    with pytest.raises(FailureError) as caught:
        await agent.adapters.load(version.policy, version.uri)
    assert (caught.value.boundary, caught.value.code) == ("engine", "probe_failed")
    assert await agent.loaded() == {}
    assert list(agent.folder.iterdir()) == []


async def test_the_weights_of_the_version_before_are_caught(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    before = publish(storage, adapters(5), step=1)
    await agent.adapters.load(before.policy, before.uri)
    version = publish(storage, adapters(5), step=2, probed=adapters(6))
    with pytest.raises(FailureError, match=f"it answers as {re.escape(before.name)} does") as caught:
        await agent.adapters.load(version.policy, version.uri)
    assert caught.value.code == "other_version"
    assert (await agent.loaded()).keys() == {before.name}


async def test_an_adapter_without_effect_is_caught(agent: Agent, adapters: Any, publish: Any, storage: Path) -> None:
    version = publish(storage, adapters(7, scale=0.0), probed=adapters(8))
    with pytest.raises(FailureError) as caught:
        await agent.adapters.load(version.policy, version.uri)
    assert caught.value.code == "adapter_not_applied"
    assert await agent.loaded() == {}


async def test_an_adapter_of_another_model_is_caught(
    agent: Agent, adapters: Any, publish: Any, storage: Path, other_model: Path
) -> None:
    # vLLM takes it, answers 200, and applies what happens to fit.
    version = publish(storage, adapters(9, base=other_model))
    with pytest.raises((FailureError, EngineFailure)) as caught:
        await agent.adapters.load(version.policy, version.uri)
    assert caught.value.code in {"probe_failed", "adapter_refused"}
    assert await agent.loaded() == {}
    assert generate(agent.server, "base", [60, 61])[0] == 200, "and the engine lives"


async def test_a_rank_above_the_engines_is_refused_with_the_fix(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    version = publish(storage, adapters(10, rank=16))
    with pytest.raises(EngineFailure, match=r"rank 16 is above the engine's limit.*max-lora-rank") as caught:
        await agent.adapters.load(version.policy, version.uri)
    assert caught.value.code == "rank_too_high"
    assert (await agent.engine.look()).healthy
    assert list(agent.folder.iterdir()) == []


async def test_all_slots_serve_their_own_version_and_a_retired_one_is_gone(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    versions = [publish(storage, adapters(20 + step), step=step) for step in range(4)]
    for version in versions[:3]:
        await agent.adapters.load(version.policy, version.uri)
    with pytest.raises(EngineFailure) as caught:
        await agent.adapters.load(versions[3].policy, versions[3].uri)
    assert caught.value.code == "no_free_slot"
    await agent.adapters.retire(versions[0].policy)
    assert not (agent.folder / versions[0].name).exists()
    assert generate(agent.server, versions[0].name, [60, 61])[0] == 404
    await agent.adapters.load(versions[3].policy, versions[3].uri)
    # Proving the older ones again shows that none took another's place.
    for version in versions[1:]:
        assert (await agent.adapters.load(version.policy, version.uri)).gap < BOUND
    assert set(await agent.loaded()) == {version.name for version in versions[1:]}


async def test_an_adapter_of_the_embedding_is_proved(agent: Agent, adapters: Any, publish: Any, storage: Path) -> None:
    some, whole = (publish(storage, adapters(seed, targets=targets), step=seed) for seed, targets in EMBEDDED.items())
    for version in (some, whole, some):
        assert (await agent.adapters.load(version.policy, version.uri)).gap < BOUND


async def test_concurrent_requests_use_their_own_adapter_or_none(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    """Three versions and the base in one batch, prompts and answers interleaved."""
    made = {f"{seed}": adapters(seed) for seed in (30, 31, 32)}
    names = {seed: publish(storage, adapter, step=int(seed)) for seed, adapter in made.items()}
    for version in names.values():
        await agent.adapters.load(version.policy, version.uri)
    wanted = [("base", made["30"]), *((names[seed].name, made[seed]) for seed in made)] * 2
    prompts = [list(range(100 + place, 140 + 3 * place)) for place in range(len(wanted))]
    sampling = {"max_tokens": 48, "temperature": 1.0, "seed": 5, "logprobs": 0, "ignore_eos": True}
    answers = await asyncio.gather(
        *(
            asyncio.to_thread(generate, agent.server, name, prompt, **sampling)
            for (name, _), prompt in zip(wanted, prompts, strict=True)
        )
    )
    for (name, adapter), prompt, (status, answer) in zip(wanted, prompts, answers, strict=True):
        assert (status, answer["model"]) == (200, name)
        (choice,) = answer["choices"]
        behaviour = [item["logprob"] for item in choice["logprobs"]["content"]]
        ours = adapter.score([*prompt, *choice["token_ids"]], base=name == "base")[len(prompt) - 1 :]
        assert max(abs(a - b) for a, b in zip(behaviour, ours, strict=True)) < BOUND, name


async def test_a_version_is_proved_while_others_are_sampled_from(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    """vLLM 0.32's own way with adapters on a CPU ends the engine here: a proof's log-probs in one batch with a request
    of its own adapter."""
    first, second = (publish(storage, adapters(33 + step), step=step) for step in range(2))
    await agent.adapters.load(first.policy, first.uri)
    sampling = {"max_tokens": 1000, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    sampled = [
        asyncio.create_task(asyncio.to_thread(generate, agent.server, first.name, [100 + place, 60], **sampling))
        for place in range(3)
    ]
    async with asyncio.timeout(60):
        while (await agent.engine.look()).load.running < len(sampled):
            pass  # a look is an answer of the engine: it says no more often than it steps
    assert (await agent.adapters.load(second.policy, second.uri)).gap < BOUND
    assert (await agent.adapters.load(first.policy, first.uri)).gap < BOUND
    assert not any(task.done() for task in sampled), "nothing ran beside the proofs"
    assert [status for status, _ in await asyncio.gather(*sampled)] == [200] * 3


async def test_a_new_agent_clears_adapters_of_the_previous_one(
    agent: Agent, adapters: Any, publish: Any, storage: Path
) -> None:
    version = publish(storage, adapters(30))
    await agent.adapters.load(version.policy, version.uri)
    agent.adapters.held.clear()  # as if its process had been killed
    successor = await beside(agent.server, agent.folder)
    assert await successor.loaded() == {}
    assert list(agent.folder.iterdir()) == []
    await successor.adapters.load(version.policy, version.uri)
    await successor.end()


# --- death


async def test_a_killed_engine_leaves_nothing_and_gets_its_versions_back(
    servers: Any, adapters: Any, publish: Any, has_ended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_KEY, CONTROL)
    server = servers[1]
    agent = await beside(server, tmp_path / "adapters")
    versions = [publish(tmp_path / "storage", adapters(40 + step), step=step) for step in (1, 2)]
    for version in versions:
        await agent.adapters.load(version.policy, version.uri)

    below = server.children()
    assert below, "the engine core is a child of the server"
    watched = [os.pidfd_open(pid) for pid in below]
    server.kill()
    assert all(has_ended(pidfd) for pidfd in watched), "an engine core outlived its killed server"
    for pidfd in watched:
        os.close(pidfd)

    await agent.watch.look()
    assert agent.watch.state is EngineState.DOWN
    assert agent.watch.failure is not None
    assert agent.watch.failure.code == "engine_down"
    assert agent.adapters.proved() == frozenset()

    server.start()
    server.wait_until_healthy()
    await agent.watch.look()
    assert agent.watch.state is EngineState.READY
    assert agent.watch.restarts == 1
    assert agent.adapters.proved() == {version.name for version in versions}
    assert set(await agent.loaded()) == {version.name for version in versions}

    below = [os.pidfd_open(pid) for pid in server.children()]
    server.stop()  # the exit code of vLLM after a SIGTERM is 0 or 1; it must end and leave nothing
    assert all(has_ended(pidfd) for pidfd in below), "an engine core outlived its server"
    for pidfd in below:
        os.close(pidfd)
    await agent.engine.close()


async def test_an_engine_that_can_never_start_ends_the_run_with_its_root_cause(model: Path, tmp_path: Path) -> None:
    """A model folder without weights: vLLM's last line only says "See root cause above"."""
    broken, folder = tmp_path / "model", tmp_path / "run"
    shutil.copytree(model, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    for part in ("logs", "settings", "code", "work"):
        (folder / part).mkdir(parents=True)
    (folder / "code" / "sleeper.py").write_text("import time; time.sleep(600)")
    planned = planned_engine(broken, folder / "work", free_port())
    learner = Component(name="learner-0", role=Role.LEARNER, module="sleeper", restarts=False)
    environment = {**os.environ, "PYTHONPATH": str(folder / "code")}
    secrets = {secret.value: "a secret" for secret in Secret}
    launcher = Launcher(folder=folder, secrets=secrets, environment=environment)
    supervisor = Supervisor([planned, learner], launcher, lambda: None)
    with pytest.raises(
        ComponentFailed, match="engine-0 cannot start: RuntimeError: Cannot find any model weights"
    ) as raised:
        await supervisor.run()
    assert raised.value.code == "engine_cannot_start"
    assert supervisor.observed["engine-0"].restarts == 0
    assert "See root cause above" in launcher.log_path("engine-0").read_text()
