"""An MLflow server over a database file, in an environment of its own, for as long as something is sent to it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from kestrl._app.interpreters.requirements import environment_python, say
from kestrl._app.ports import LOOPBACK, reserved_port
from kestrl._app.push.guarded import guarded
from kestrl._app.push.target import TargetUnavailable
from kestrl.errors import UserInputError

REQUIREMENT = "mlflow==3.17.2"
START_SECONDS = 120.0
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
LAST_LINES = 4


@contextmanager
def serving_mlflow(database: str) -> Generator[str]:
    """The address of a server over a database.

    Args:
        database: Address of the database, such as sqlite:///mlflow.db.

    Raises:
        UserInputError: MLflow cannot be installed.
        TargetUnavailable: The server does not start.
    """
    python = environment_python([REQUIREMENT], python=None, field="--to mlflow", say=say)
    with tempfile.TemporaryDirectory(prefix="kestrl-mlflow-") as folder, reserved_port() as port:
        log = Path(folder) / "log"
        where = ["--host", LOOPBACK, "--port", str(port), "--workers", "1"]
        stores = ["--backend-store-uri", database, "--artifacts-destination", f"{folder}/artifacts"]
        command = [str(python), "-m", "mlflow", "server", *where, *stores]
        with (
            log.open("wb") as output,
            guarded(command, variables=QUIET, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
        ):
            uri = f"http://{LOOPBACK}:{port}"
            _await_start(uri, process, log)
            yield uri


def _await_start(uri: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{uri}/health", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.2)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reason = "; ".join(lines[-LAST_LINES:]) or "it printed nothing"
    raise TargetUnavailable(f"MLflow's server does not start: {reason}", code="push_server_failed")


def database_of(uri: str) -> str | None:
    """The database that an address names; None for a server.

    Raises:
        UserInputError: It is a folder of files, which MLflow itself refuses.
    """
    scheme = urlsplit(uri).scheme
    if scheme in {"http", "https"}:
        return None
    if scheme == "sqlite":
        return uri
    raise UserInputError(
        f"--uri: {uri!r}: MLflow keeps traces in no folder of files; name a server (http://127.0.0.1:5000, started by "
        "`uvx mlflow server`) or a database (sqlite:///mlflow.db)"
    )
