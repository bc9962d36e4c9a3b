"""An engine with one adapter, behind its guard: the OpenAI-compatible routes need a key."""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.engines.interpreter import ENGINE_FOLDER, engine_build, engine_python, write_engine_folder
from kestrl._app.engines.running import EngineKeys, EngineStartError, RunningEngine, running_engine
from kestrl._app.interpreters.places import in_use
from kestrl._app.serving.jobs import ServingJob
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import engine_component
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl.engines import Request
from kestrl.engines.registry import DIALECTS

LOAD_SECONDS = 120.0
LONGEST_ANSWER = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter to load into the engine."""

    name: str
    folder: Path


@contextmanager
def endpoint(
    serving: ServingJob, adapter: ServedAdapter | None, *, host: str, port: int, key: str, work: Path, log: Path
) -> Generator[RunningEngine]:
    """Runs the job's engine with the adapter until the context ends.

    Args:
        serving: Base model and engine.
        adapter: The adapter; None for the base model alone.
        host: Address to listen at.
        port: A free port of it.
        key: Credential of the routes that sample.
        work: Folder for the engine's files.
        log: File for its output.

    Raises:
        UserInputError: The engine is not installed, or not what the job needs.
        EngineStartError: It does not start, or refuses the adapter.
    """
    inference = serving.job.spec.inference
    engine_build(inference, serving.base)
    python = engine_python(inference, serving.base)
    write_engine_folder(work / ENGINE_FOLDER)
    component = _component(serving, python, host, port, work)
    keys = EngineKeys(data=key, control=secrets.token_urlsafe(24))
    with in_use(None if python is None else Path(python)), running_engine(component, keys, work, log, host) as engine:
        if adapter is not None:
            _send(engine, DIALECTS[inference.engine].load(adapter.name, str(adapter.folder)), keys.control, log)
        yield engine


def _component(serving: ServingJob, python: str | None, host: str, port: int, work: Path) -> Component:
    site = Site(
        run=serving.job.metadata.name,
        endpoint=lambda _role, _index: ReplicaEndpoint(bind=host, host=host, port=port),
        model=serving.model,
        template=serving.template,
        train="",
        validation=None,
        storage="",
        database="",
        work_dir=str(work),
        engine_python=python,
        engine_path=str(work / ENGINE_FOLDER),
    )
    component = engine_component(serving.job, site, 0, template=serving.template, tool_calls=serving.tool_calls)
    assert component.role is Role.ENGINE
    return component


def _send(engine: RunningEngine, request: Request, key: str, log: Path) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    message = urllib.request.Request(  # noqa: S310 - the engine that was started here
        f"{engine.url}{request.path}", request.body or None, headers, method=request.method
    )
    try:
        with urllib.request.urlopen(message, timeout=LOAD_SECONDS):  # noqa: S310 - as above
            return
    except urllib.error.HTTPError as error:
        answer = error.read(LONGEST_ANSWER).decode(errors="replace")
        raise EngineStartError(f"the engine refuses the adapter: {error.code}: {answer}; its log is {log}") from error
    except (urllib.error.URLError, OSError) as error:
        raise EngineStartError(f"the engine does not load the adapter: {error}; its log is {log}") from error
