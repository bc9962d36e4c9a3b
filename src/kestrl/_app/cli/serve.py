"""The command `kestrl serve`: a policy of a run behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kestrl._app.cli.adapters import choose_adapter, trained_run
from kestrl._app.cli.options import DEFAULT_RUNS, EnginePython, Overrides, RunId, Runs, with_engine
from kestrl._app.cli.sft import SETTINGS
from kestrl._app.engines.running import EngineStartError
from kestrl._app.local.rundir import find_run
from kestrl._app.ports import LOOPBACK, reserved_port
from kestrl._app.serving.endpoint import ServedAdapter, endpoint
from kestrl._app.serving.jobs import ServingJob, job_of_run, job_of_sft
from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.sft import SFTSettings
from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore, fetch_adapter
from kestrl.storage.models import fetch_model, model_folders

console = Console()
errors = Console(stderr=True)
PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
KEY = "KESTRL_SERVE_KEY"


def serve(
    run_id: RunId = None,
    step: Annotated[int | None, typer.Option(help="Step of the adapter (default: the newest).")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every interface.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 is a free one.")] = 8000,
    key_from: Annotated[
        str,
        typer.Option(
            "--key-from", help="Environment variable with the key of clients; if unset, a new one is printed."
        ),
    ] = KEY,
    engine_python: EnginePython = None,
    set_: Overrides = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Serve a policy of a run behind an OpenAI-compatible endpoint, with the engine of its job. Ctrl-C ends it.

    Every digest of the adapter is verified. A run of `kestrl sft` is named by its folder, NAME-sft.
    """
    key = os.environ.get(key_from) or secrets.token_urlsafe(24)
    overrides = with_engine(set_, engine_python)
    with ExitStack() as stack:
        bound = _reserved(stack, host, port)
        trained = trained_run(runs, run_id)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the engine ends, its files are removed
        log = runs / trained.id / "logs" / f"serve-{bound}.log"  # kept: it says why an engine did not start
        log.parent.mkdir(parents=True, exist_ok=True)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kestrl-serve-")))
        serving, adapter = _served(runs, trained.id, trained.store, step, overrides, work)
        errors.print(f"starting {serving.job.spec.inference.engine}; its log is {log}", **PLAIN)
        served = endpoint(serving, adapter, host=host, port=bound, key=key, work=work, log=log)
        with suppress(KeyboardInterrupt), served as engine:
            names = [BASE_MODEL_NAME, *(() if adapter is None else (adapter.name,))]
            _print_use(f"{engine.url}/v1", names, None if os.environ.get(key_from) else key, key_from)
            status = engine.wait()
            raise EngineStartError(f"the engine ended with status {status}: {_last_line(log)}")


def _reserved(reservations: ExitStack, host: str, port: int) -> int:
    """The wanted port of a host, or a free one if it is 0, reserved until the reservations end.

    Raises:
        UserInputError: It is taken, or the host is not this machine's.
    """
    try:
        return reservations.enter_context(reserved_port(host, port, reuse=port != 0))
    except OSError as error:
        raise UserInputError(f"--host, --port: {host}:{port} cannot be listened at: {error.strerror}") from error


def _served(
    runs: Path, run: str, store: ObjectStore, step: int | None, overrides: Sequence[str], work: Path
) -> tuple[ServingJob, ServedAdapter | None]:
    """What is served of a run, its files fetched with every digest verified."""
    settings = runs / run / SETTINGS
    sft = read_settings(SFTSettings, settings) if settings.is_file() else None
    if sft is not None and (folders := model_folders(store)):
        fetch_model(store, work / "model", folders[-1])
        return job_of_sft(sft, str(work / "model"), overrides), None
    manifest = fetch_adapter(store, work / "adapter", choose_adapter(store, step, run))
    adapter = ServedAdapter(name=manifest.policy.name, folder=work / "adapter")
    if sft is not None:
        return job_of_sft(sft, sft.model, overrides), adapter
    folder = find_run(runs, run)
    return job_of_run(folder.read_json("job.json"), overrides, folder.manifest_dir), adapter


def _print_use(url: str, names: Sequence[str], key: str | None, key_from: str) -> None:
    """Prints the address, the names, and a request to paste."""
    console.print(f"{', '.join(names)} at {url}", **PLAIN)
    if key is not None:
        console.print(f"key: {key}", **PLAIN)
    body = json.dumps({"model": names[-1], "messages": [{"role": "user", "content": "Hello"}]})
    bearer = key or f"${key_from}"
    console.print(
        f"try: curl {url}/chat/completions -H \"Authorization: Bearer {bearer}\" -H 'Content-Type: application/json' "
        f"-d '{body}'",
        **PLAIN,
    )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def register(app: typer.Typer) -> None:
    app.command()(serve)
