"""A whole stage for the learner: tiny random models, fake engine agents and rollout workers over real gRPC, and an
oracle.

The oracle is a second copy of the model that loads adapters from storage, as an engine does: the fakes report its
log-probs, so that a run's log-prob gap is a fact about what was published, not a constant.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.ports import free_port
from tests.unit.learner.fakes import VOCABULARY, FakeAgent, FakeWorker, Oracle, make_policy, served

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.learner import EngineEntry, GapBounds, LearnerSettings
from kestrl.api.inference.v1 import inference_pb2_grpc as istubs
from kestrl.api.rollout.v1 import rollout_pb2 as rpb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as rstubs
from kestrl.episode import Group, Purpose
from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.errors import Failure
from kestrl.storage import open_store
from kestrl.storage.episodes import TRAINED_OUTCOMES, GroupOutcome, ObjectEpisodeStore, StoredGroup
from kestrl_learner.dispatch import workers as workers_module
from kestrl_learner.engines import engines as engines_module
from kestrl_learner.model.policy_model import PolicyModel


def build_model(kind: str, folder: Path) -> Path:
    """A random model of a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as quiet

    quiet.disable_progress_bar()
    torch.manual_seed(7)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by kind."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {kind: build_model(kind, root / kind) for kind in ("qwen3", "llama")}


@pytest.fixture
def policy_of() -> Callable[..., PolicyModel]:
    return make_policy


@dataclass
class Stage:
    """Engines, workers, data and settings of a run."""

    settings: LearnerSettings
    agents: list[FakeAgent]
    workers: list[FakeWorker]
    folder: Path
    oracle: Oracle
    """What the agents and workers have their log-probs from."""
    failures: list[Failure] = field(default_factory=list)

    def read(self, path: str) -> Any:
        return json.loads((self.folder / "store" / path).read_bytes())

    @property
    def summary(self) -> Any:
        return self.read("summary.json")

    def groups(self, step: int, purpose: Purpose = Purpose.TRAIN) -> list[Group]:
        """The groups that a step trained on, or those of an evaluation."""
        used = TRAINED_OUTCOMES | {GroupOutcome.EVALUATED}
        return [each.trained for each in self.stored(step, purpose) if each.outcome in used]

    def stored(self, step: int, purpose: Purpose = Purpose.TRAIN) -> Sequence[StoredGroup]:
        """All groups of a stored batch."""
        return ObjectEpisodeStore(open_store(str(self.folder / "store"))).read(purpose, step).stored

    def adapter_bytes(self, step: int) -> bytes:
        (folder,) = (self.folder / "store" / "adapters").glob(f"{step:06d}-*")
        return (folder / "adapter_model.safetensors").read_bytes()

    @property
    def states(self) -> dict[str, int]:
        """The ledger's scenarios by state."""
        with closing(sqlite3.connect(self.folder / "ledger.db")) as connection:
            return dict(connection.execute("SELECT state, count(*) FROM work GROUP BY state").fetchall())

    @property
    def reasons(self) -> list[str]:
        """Why scenarios were dropped, in the order of their positions."""
        with closing(sqlite3.connect(self.folder / "ledger.db")) as connection:
            rows = connection.execute("SELECT reason FROM work WHERE state = 'dropped' ORDER BY position").fetchall()
        return [row[0] for row in rows]

    def asked(self, purpose: str = "train") -> list[rpb.RunGroupRequest]:
        """Requests of all workers."""
        return [request for worker in self.workers for request in worker.requests if request.purpose == purpose]

    def but(self, *, algorithm: dict[str, Any] | None = None, **changes: Any) -> LearnerSettings:
        """The settings, changed."""
        settings = self.settings.model_copy(update=changes)
        return settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update=algorithm or {})})


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"{path.stem}-{row}", "question": "?"}) + "\n" for row in range(count)))
    return path


def make_settings(folder: Path, model: Path, **changes: Any) -> LearnerSettings:
    """Settings of a run of 6 scenarios, two epochs, two groups of three a step, six steps in all."""
    algorithm = AlgorithmSettings(
        name="grpo",
        group_size=3,
        groups_per_step=2,
        learning_rate=1e-2,
        clip_low=0.2,
        clip_high=0.28,
        max_staleness=0,
        on_failed_episode="drop",
        min_group_size=2,
        max_grad_norm=1.0,
        weight_decay=0.0,
        warmup_steps=0,
        advantage="grpo",
        loss="ppo_clip",
    )
    given: dict[str, Any] = {
        "component": "learner-0",
        "job": "test",
        "run": "test-1",
        "listen": f"127.0.0.1:{free_port()}",
        "model": str(model),
        "dtype": "float32",
        "rank": 4,
        "alpha": 8.0,
        "targets": "all-linear",
        "data": DataSettings(path=str(write_rows(folder / "train.jsonl", 6))),
        "validation": DataSettings(path=str(write_rows(folder / "held.jsonl", 3))),
        "seed": 11,
        "epochs": 2,
        "max_steps": None,
        "eval_every": None,
        "checkpoint_every": 2,
        "keep_checkpoints": 2,
        "temperature": 1.0,
        "max_tokens": 64,
        "max_turns": 4,
        "max_tokens_per_turn": 0,
        "deadlines": RolloutDeadlines(tool=1.0, turn=2.0, episode=10.0, group=20.0),
        "algorithm": algorithm,
        "storage": (folder / "store").as_uri(),
        "database": f"sqlite:///{folder}/ledger.db",
        "adapter_slots": 3,
        "gap_bounds": GapBounds(mean=1e-4, p99=1e-3, max=1e-2, ess=0.999),
        "max_failed_share": 0.5,
        "threads": 1,
        "start_seconds": 10.0,
    }
    return LearnerSettings.model_validate(given | changes)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are frequent, so that what is seen by looking is seen soon."""
    for module, name, figure in (
        (engines_module, "POLL_SECONDS", 0.05),
        (engines_module, "BACKOFF", Backoff(0.05, 60)),
        (engines_module, "STRAGGLER_SECONDS", 0.5),
        (workers_module, "POLL_SECONDS", 0.2),
        (workers_module, "RETRY_SECONDS", 0.05),
    ):
        monkeypatch.setattr(module, name, figure)


Staging = Callable[..., Any]


@pytest.fixture
def staged(models: dict[str, Path], tmp_path: Path) -> Staging:
    """`async with staged(engines=2, workers=1, **settings) as stage`."""

    @asynccontextmanager
    async def build(*, engines: int = 2, workers: int = 1, **changes: Any) -> AsyncGenerator[Stage]:
        oracle = Oracle(models["qwen3"])
        agents = [FakeAgent(f"engine-{index}", oracle, tmp_path / "engines") for index in range(engines)]
        fakes = [FakeWorker(oracle) for _ in range(workers)]
        async with AsyncExitStack() as stack:
            agent_addresses = [
                await stack.enter_async_context(
                    served(agent.name, lambda s, a=agent: istubs.add_EngineAgentServiceServicer_to_server(a, s))
                )
                for agent in agents
            ]
            worker_addresses = [
                await stack.enter_async_context(
                    served("rollout", lambda s, w=fake: rstubs.add_RolloutServiceServicer_to_server(w, s))
                )
                for fake in fakes
            ]
            entries = tuple(
                EngineEntry(name=agent.name, url=f"http://{agent.name}", agent_address=address)
                for agent, address in zip(agents, agent_addresses, strict=True)
            )
            settings = make_settings(
                tmp_path,
                models["qwen3"],
                rollout_addresses=tuple(worker_addresses),
                engines=entries,
                **changes,
            )
            yield Stage(settings=settings, agents=agents, workers=fakes, folder=tmp_path, oracle=oracle)

    return build
