"""Checks an installed engine: starts it with a small model, and runs the conformance suite of its dialect."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.engines.interpreter import ENGINE_FOLDER, write_engine_folder
from kestrl._app.engines.random_adapter import RANK, write_random_adapter
from kestrl._app.engines.running import EngineKeys, running_engine
from kestrl._app.engines.store import VERIFIED, Installed
from kestrl._app.interpreters.places import in_use
from kestrl._app.ports import LOOPBACK, reserved_port
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import engine_component
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl._shared.spec import parse_job
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import KestrlError, UserInputError
from kestrl.testing.engines import check_engine

CONTEXT = 512
PROMPT = tuple(range(20, 50))
"""Token ids of a prompt that every model has."""
CACHES: Mapping[str, Mapping[str, int]] = {"vllm": {"kv-cache-memory-bytes": 64 * 2**20}}
"""Arguments for a small cache, by engine."""
SLOTS = 4
LOG = "engine.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine that was started to be asked."""

    url: str
    key: str
    """Credential that grants all routes."""
    adapter: str
    """Folder of an adapter for its model."""


class EngineCheckError(KestrlError):
    """An engine does not do what training needs."""


def check_installed(engine: Installed, model: str, work: Path) -> None:
    """Starts an engine with a model, runs the conformance suite and notes that it passed.

    Args:
        engine: The engine.
        model: Folder of a model of Qwen's or Llama's layout.
        work: Folder for the log and the adapter.

    Raises:
        UserInputError: The folder has no such model.
        EngineStartError: It does not start.
        EngineCheckError: It does not conform. The message has the path of its log.
    """
    with started_engine(engine, model, work) as started:
        try:
            check_engine(
                DIALECTS[engine.record.engine],
                started.url,
                base=BASE_MODEL_NAME,
                adapter=started.adapter,
                prompt_ids=PROMPT,
                key=started.key,
            )
        except (AssertionError, OSError, ValueError) as error:
            raise EngineCheckError(f"{engine} does not conform: {error}; its log is {work / LOG}") from error
    (engine.path / VERIFIED).touch()


@contextmanager
def started_engine(engine: Installed, model: str, work: Path, *, slots: int = SLOTS) -> Generator[StartedEngine]:
    """Starts an engine with a model, and writes a random adapter for it.

    Args:
        engine: The engine.
        model: Folder of a model of Qwen's or Llama's layout.
        work: Folder for the log and the adapter.
        slots: Number of adapters that it can hold.

    Raises:
        UserInputError: The folder has no such model.
        EngineStartError: It does not start.
    """
    config = Path(model) / "config.json"
    try:
        write_random_adapter(json.loads(config.read_bytes()), work / "adapter", seed=1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"--model: {config} does not describe a model of Qwen's or Llama's layout") from error
    keys = EngineKeys(data=secrets.token_urlsafe(16), control=secrets.token_urlsafe(16))
    with reserved_port() as port, in_use(engine.python):
        component = _component(engine, model, work, port, slots)
        with running_engine(component, keys, work, work / LOG) as served:
            yield StartedEngine(url=served.url, key=keys.control, adapter=str(work / "adapter"))


def _component(engine: Installed, model: str, work: Path, port: int, slots: int) -> Component:
    """The engine as a job of this model would plan it."""
    write_engine_folder(work / ENGINE_FOLDER)
    job = parse_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "engine-check"},
            "spec": {
                "model": {"base": model, "adapter": {"rank": RANK}},
                "data": {"train": {"uri": "none.jsonl"}},
                "rewards": [{"rule": "format"}],
                "agent": {"maxTokens": CONTEXT // 2},
                "inference": {
                    "engine": engine.record.engine,
                    "contextLength": CONTEXT,
                    "adapterSlots": slots,
                    "accelerator": {"profile": engine.record.device},
                    "args": CACHES.get(engine.record.engine, {}),
                },
            },
        }
    )

    def endpoint(_role: Role, _index: int) -> ReplicaEndpoint:
        return ReplicaEndpoint(bind=LOOPBACK, host=LOOPBACK, port=port)

    site = Site(
        run="engine-check",
        endpoint=endpoint,
        model=model,
        template=None,
        train="",
        validation=None,
        storage="",
        database="",
        work_dir=str(work),
        engine_python=str(engine.python),
        engine_path=str(work / ENGINE_FOLDER),
    )
    return engine_component(job, site, 0)
