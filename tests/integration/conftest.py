"""Real parts for the integration tests: a tiny random model, real peft adapters, real vLLM servers started as the plan
says."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._app.engines.interpreter import ENGINE_FOLDER, engine_python, write_engine_folder
from kestrl._app.engines.variables import engine_environment
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import engine_component
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl._shared.spec import parse_job
from kestrl._shared.spec.inference import Inference
from kestrl.episode import PolicyVersion
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS
from kestrl.storage.files import digest
from kestrl_learner.model.adapters import probe_ids

KEYS = {"KESTRL_ENGINE_KEY": "test-data-key", "KESTRL_ENGINE_CONTROL_KEY": "test-control-key"}
START_SECONDS = 240.0
VOCABULARY = 320
PROBE_IDS = probe_ids(VOCABULARY)


# --- the model and its adapters


def make_model(folder: Path, *, hidden: int = 128, layers: int = 4) -> Path:
    """A random Qwen3 with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.add_special_tokens({"eos_token": "<|im_end|>"})
    wrapped.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,  # so that its distributions are far from uniform
        eos_token_id=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Adapter:
    """A real peft adapter and what the learner's side computes with it."""

    files: dict[str, bytes]
    rank: int
    model: Any

    def score(self, ids: Sequence[int], *, base: bool = False, temperature: float = 1.0) -> list[float]:
        """Log-prob of every token after the first, by transformers and peft."""
        import contextlib

        import torch

        with torch.no_grad(), self.model.disable_adapter() if base else contextlib.nullcontext():
            logits = self.model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
        targets = torch.tensor(list(ids)[1:])
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].tolist()


def make_adapter(
    model: Path, folder: Path, *, seed: int, rank: int = 8, scale: float = 0.05, targets: str | list[str] = "all-linear"
) -> Adapter:
    """An adapter with random weights; with `scale` 0 it is the base model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    peft = get_peft_model(base, config).eval()
    for name, weight in peft.named_parameters():
        if "lora_B" in name or "lora_embedding_" in name:  # of an embedding A is what begins as zeros
            torch.nn.init.normal_(weight, std=scale)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return Adapter({name: (folder / name).read_bytes() for name in ("adapter_config.json", WEIGHTS)}, rank, peft)


@dataclass(frozen=True)
class Published:
    policy: PolicyVersion
    uri: str

    @property
    def name(self) -> str:
        return self.policy.name


def publish(storage: Path, adapter: Adapter, *, step: int = 1, probed: Adapter | None = None) -> Published:
    """Publishes an adapter; `probed` is another one, whose log-probs the manifest then promises."""
    scored = probed or adapter
    probe = Probe(
        token_ids=PROBE_IDS,
        logprobs=tuple(scored.score(PROBE_IDS)),
        base_logprobs=tuple(scored.score(PROBE_IDS, base=True)),
    )
    manifest = AdapterManifest(
        job="job",
        step=step,
        sha256=digest(adapter.files[WEIGHTS]),
        files={name: digest(content) for name, content in adapter.files.items()},
        base_model="tiny",
        rank=adapter.rank,
        alpha=2 * adapter.rank,
        targets=("all-linear",),
        parent=None,
        probe=probe,
    )
    return Published(manifest.policy, publish_adapter(open_store(str(storage)), adapter.files, manifest))


# --- the servers


CACHES = {"vllm": {"kv-cache-memory-bytes": 64 * 1024 * 1024}, "sglang": {"max-total-tokens": 8192}}
"""Arguments for a small cache, by engine."""


def planned_engine(model: Path, work: Path, port: int, python: Path | None = None, engine: str = "vllm") -> Component:
    """The engine that the plan gives a job with this model: slots for three versions of rank 8. Without an
    interpreter it is that of the installed engine. Each port has an engine folder of its own: an engine that is just
    starting imports from its folder, and must not find it half written by the next one.
    """
    folder = work / f"{ENGINE_FOLDER}-{port}"
    write_engine_folder(folder)
    manifest = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": str(model), "adapter": {"rank": 8}},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "format"}],
            "inference": {"engine": engine, "contextLength": 1024, "adapterSlots": 3, "args": CACHES[engine]},
            "agent": {"maxTokens": 512},
        },
    }

    def endpoint(_role: Role, _index: int) -> ReplicaEndpoint:
        return ReplicaEndpoint(bind="127.0.0.1", host="127.0.0.1", port=port)

    site = Site(
        run="run",
        endpoint=endpoint,
        model=str(model),
        template=None,
        train="unused",
        validation=None,
        storage="unused",
        database="unused",
        work_dir=str(work),
        engine_python=engine_python(Inference(), work) if python is None else str(python),
        engine_path=str(folder),
    )
    return engine_component(parse_job(manifest), site, 0)


@dataclass
class Server:
    """A real server of an engine. vLLM's dies with the thread that started it, however that ends."""

    model: Path
    work: Path
    python: Path | None = None
    engine: str = "vllm"
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables beside those of the plan."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _began: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        planned = planned_engine(self.model, self.work, self.port, self.python, self.engine)
        environment = {**engine_environment(os.environ, planned.python), **planned.env, **self.variables, **KEYS}
        self._began = time.monotonic()
        with (self.work / f"engine-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [planned.python or sys.executable, "-m", planned.module, *planned.args],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def log(self) -> str:
        return (self.work / f"engine-{self.port}.log").read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        assert self.process is not None
        while self.ask("GET", "/health")[0] != 200:
            assert self.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() - self._began < START_SECONDS, self.log()[-4000:]
            time.sleep(0.1)

    def ask(self, method: str, path: str, *, key: str = "", body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of one request; status 0 where nobody answers."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return 0, b""

    def children(self) -> list[int]:
        """The server's own child processes."""
        return [
            int(child)
            for task in Path(f"/proc/{self.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def has_ended(pidfd: int, seconds: float = 60.0) -> bool:
    """Whether the process of a pidfd ends within a time."""
    return bool(select.select([pidfd], [], [], seconds)[0])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two healthy servers, started side by side: the second is for tests that kill."""
    work = tmp_path_factory.mktemp("engines")
    pair = (Server(model, work), Server(model, work))
    for server in pair:
        server.start()
    for server in pair:
        server.wait_until_healthy()
    yield pair
    for server in pair:
        if server.process is not None and server.process.poll() is None:
            server.stop()
    shutil.rmtree(work / "vllm-cache", ignore_errors=True)


MakeAdapter = Callable[..., Adapter]


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """Makes adapters for the tests' model, or for another."""

    def make(seed: int, *, base: Path = model, **options: Any) -> Adapter:
        return make_adapter(base, tmp_path_factory.mktemp("adapter"), seed=seed, **options)

    return make


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape."""
    return make_model(tmp_path_factory.mktemp("other"), hidden=64, layers=2)


# Helpers of this file for the tests, which cannot import it.


@pytest.fixture(name="publish", scope="session")
def publish_fixture() -> Callable[..., Published]:
    return publish


@pytest.fixture(name="has_ended", scope="session")
def has_ended_fixture() -> Callable[..., bool]:
    return has_ended
