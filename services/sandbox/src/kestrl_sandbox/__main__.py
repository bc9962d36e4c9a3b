"""`python -m kestrl_sandbox`: serves the sandbox over HTTP, as `kestrl sandbox serve` does, without that program."""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

from kestrl._shared.service import exit_code
from kestrl._shared.user_secrets import FOLDER_VARIABLE, user_secret
from kestrl.errors import UserInputError
from kestrl_sandbox.backends import open_sandbox
from kestrl_sandbox.config import PoolConfig, default_size
from kestrl_sandbox.contract import Isolation
from kestrl_sandbox.remote.origin import is_loopback
from kestrl_sandbox.remote.server import application
from kestrl_sandbox.remote.slot_server import IDLE_SECONDS

TOKEN_VARIABLE = "KESTRL_SANDBOX_TOKEN"  # noqa: S105 - the name of a variable
LARGEST_PORT = 65_535


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m kestrl_sandbox") -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        UserInputError: The server cannot start as the options say.
    """
    options = _parser(program).parse_args(arguments)
    guarded = bool(user_secret(TOKEN_VARIABLE))
    if not guarded and not is_loopback(options.host):
        raise UserInputError(f"--host: {options.host} can be reached from elsewhere; set {TOKEN_VARIABLE}")
    config = PoolConfig(
        max_sandboxes=options.max_sandboxes, max_waiting=options.max_waiting, memory_mb=options.memory_mb
    )
    asyncio.run(_serve(options, config, guarded=guarded))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serve the sandbox over HTTP with SandboxFusion's interface: /run_code, /run_jupyter and /v1/ping. "
        f"Clients show the bearer token of the variable {TOKEN_VARIABLE}, or of the file of that name in the folder of "
        f"{FOLDER_VARIABLE}, which is read again for each request; beyond the loopback interface it has to be set.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_between(0, LARGEST_PORT), default=8080, help="port to listen on; 0: a free one")
    parser.add_argument("--backend", default="auto", help="back-end: auto, zygote, bwrap or runsc")
    parser.add_argument("--isolation", choices=[*Isolation], default="namespaces", help="least isolation")
    parser.add_argument("--max-sandboxes", type=_between(1), default=default_size(), help="sandboxes at the same time")
    parser.add_argument(
        "--max-waiting", type=_between(0), default=1024, help="requests that wait for one; further ones get 429"
    )
    parser.add_argument(
        "--memory-mb", type=_between(16), default=512, help="largest memory limit of a request, and the default"
    )
    parser.add_argument(
        "--idle-seconds",
        type=_between(1),
        default=int(IDLE_SECONDS),
        help="time without a request after which a session of a connection ends",
    )
    return parser


class _between:  # noqa: N801 - argparse prints the name of a type
    """A whole number within bounds, as the type of an option."""

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self._least, self._most = minimum, maximum
        self.__name__ = f"number from {minimum}" + ("" if maximum is None else f" to {maximum}")

    def __call__(self, text: str) -> int:
        number = int(text)
        if number < self._least or (self._most is not None and number > self._most):
            raise ValueError(text)
        return number


async def _serve(options: argparse.Namespace, config: PoolConfig, *, guarded: bool) -> None:
    host, port = options.host, options.port
    pool = await open_sandbox(config, least=Isolation(options.isolation), backend=options.backend)
    read_token = functools.partial(user_secret, TOKEN_VARIABLE) if guarded else None
    app = application(pool, read_token, idle_seconds=options.idle_seconds)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UserInputError(f"--port: cannot listen on {host}:{port}: {error.strerror}") from error
        address = f"http://{host}:{runner.addresses[0][1]}"
        guard = "with the token of " + TOKEN_VARIABLE if guarded else "without a token"
        node = pool.capabilities
        sys.stdout.write(f"serving on {address} {guard}; {node.backend}, isolates by {node.isolation}\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await runner.cleanup()
        await pool.close()


if __name__ == "__main__":
    sys.exit(exit_code(main))
