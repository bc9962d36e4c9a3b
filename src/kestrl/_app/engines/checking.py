"""Checks an installed engine: starts it with a small model, and runs the conformance suite of its dialect."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kestrl._app.engines.interpreter import ENGINE_FOLDER, write_engine_folder
from kestrl._app.engines.random_adapter import RANK, write_random_adapter
from kestrl._app.engines.store import VERIFIED, Installed
from kestrl._app.engines.variables import engine_environment
from kestrl._app.interpreters.places import in_use
from kestrl._shared import engine_failure, process_guard
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import engine_component
from kestrl._shared.plan.site import Endpoint, Site
from kestrl._shared.spec import parse_job
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import KestrlError, UserInputError
from kestrl.testing.engines import check_engine

LOOPBACK = "127.0.0.1"
START_SECONDS = 600.0
"""Time limit of the engine's start."""
POLL_SECONDS = 0.2
REQUEST_SECONDS = 10.0
GRACE_SECONDS = 20.0
CONTEXT = 512
PROMPT = tuple(range(20, 50))
"""Token ids of a prompt that every model has."""
CACHES: Mapping[str, Mapping[str, int]] = {"vllm": {"kv-cache-memory-bytes": 64 * 2**20}}
"""Arguments for a small cache, by engine."""


class EngineCheckError(KestrlError):
    """An engine does not start, or does not do what training needs."""


def check_installed(engine: Installed, model: str, work: Path) -> None:
    """Starts an engine with a model, runs the conformance suite and notes that it passed.

    Args:
        engine: The engine.
        model: Folder of a model of Qwen's or Llama's layout.
        work: Folder for the log and the adapter.

    Raises:
        UserInputError: The folder has no such model.
        EngineCheckError: It does not conform. The message has the path of its log.
    """
    config = Path(model) / "config.json"
    try:
        write_random_adapter(json.loads(config.read_bytes()), work / "adapter", seed=1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"--model: {config} does not describe a model of Qwen's or Llama's layout") from error
    key = secrets.token_urlsafe(16)
    dialect = DIALECTS[engine.record.engine]
    component = _component(engine, model, work, _free_port())
    log = work / "engine.log"
    with in_use(engine.python), _running(component, key, work, log) as url:
        try:
            check_engine(dialect, url, base=BASE_MODEL_NAME, adapter=str(work / "adapter"), prompt_ids=PROMPT, key=key)
        except (AssertionError, OSError, ValueError) as error:
            raise EngineCheckError(f"{engine} does not conform: {error}; its log is {log}") from error
    (engine.path / VERIFIED).touch()


def _component(engine: Installed, model: str, work: Path, port: int) -> Component:
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
                    "accelerator": {"profile": engine.record.device},
                    "args": CACHES.get(engine.record.engine, {}),
                },
            },
        }
    )

    def endpoint(_role: Role, _index: int) -> Endpoint:
        return Endpoint(bind=LOOPBACK, host=LOOPBACK, port=port)

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


@contextmanager
def _running(component: Component, key: str, work: Path, log: Path) -> Generator[str]:
    """Runs an engine until the context ends, or this process does; yields its address."""
    environment = {
        **engine_environment(os.environ, component.python),
        **component.env,
        Secret.ENGINE_KEY.value: secrets.token_urlsafe(16),
        Secret.ENGINE_CONTROL_KEY.value: key,
    }
    engine_failure.forget(environment)
    read_end, guard_pipe = os.pipe()
    guard = (sys.executable, "-I", "-S", process_guard.__file__, str(read_end), str(GRACE_SECONDS))
    command = (component.python or sys.executable, "-m", component.module, *component.args)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the installed engine's interpreter
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=work,
            pass_fds=(read_end,),
            start_new_session=True,
        )
    os.close(read_end)
    url = f"http://{LOOPBACK}:{component.ports['http']}"
    try:
        assert component.ready is not None
        _wait(process, f"{url}{component.ready.http_path}", component.env, log)
        yield url
    finally:
        os.close(guard_pipe)  # the guard then ends the engine
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, environment: Mapping[str, str], log: Path) -> None:
    """Waits until an engine answers.

    Raises:
        EngineCheckError: It ended, or did not answer in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while not _answers(url):
        if process.poll() is not None:
            failure = engine_failure.read(Path(environment[engine_failure.VARIABLE]))
            reason = f"it ended with status {process.returncode}" if failure is None else failure.message
            raise EngineCheckError(f"the engine does not start: {reason}; its log is {log}")
        if time.monotonic() > deadline:
            raise EngineCheckError(f"the engine did not start in {START_SECONDS:g} s; its log is {log}")
        time.sleep(POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS) as answer:  # noqa: S310 - of the loopback
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])
