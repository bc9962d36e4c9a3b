"""`kestrl sandbox`: checks the code sandbox of this node."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kestrl.errors import UserInputError

if TYPE_CHECKING:
    from kestrl_sandbox.config import PoolConfig
    from kestrl_sandbox.contract import Isolation

TOKEN_VARIABLE = "KESTRL_SANDBOX_TOKEN"  # noqa: S105 - the name of a variable
app = typer.Typer(no_args_is_help=True, help="Run code that a model wrote, isolated.")
AREAS = "resources, processes, files, kernel, network, identity, tenancy"


@app.callback()
def sandbox() -> None:
    """Run code that a model wrote, isolated."""


@app.command()
def check(
    backend: Annotated[str, typer.Option(help="Back-end to check: auto, zygote, bwrap or runsc.")] = "auto",
    area: Annotated[str, typer.Option(help=f"Only one area: {AREAS}.")] = "",
    verbose: Annotated[bool, typer.Option(help="List every program, also those that were held.")] = False,
) -> None:
    """Run hostile programs in the sandbox of this node and report what they could do.

    Exit code 1: a program was not held. Exit code 2: no sandbox works here.
    """
    raise typer.Exit(asyncio.run(_check(backend, area, verbose=verbose)))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8080,
    backend: Annotated[str, typer.Option(help="Back-end: auto, zygote, bwrap or runsc.")] = "auto",
    isolation: Annotated[str, typer.Option(help="Least isolation: namespaces or kernel.")] = "namespaces",
    max_sandboxes: Annotated[int | None, typer.Option(min=1, help="Sandboxes at the same time.")] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that wait for one; further ones get 429.")] = 1024,
    memory_mb: Annotated[int, typer.Option(min=16, help="Largest memory limit of a request, and the default.")] = 512,
) -> None:
    """Serve the sandbox over HTTP with SandboxFusion's interface: /run_code, /run_jupyter and /v1/ping.

    Clients show the bearer token of the variable KESTRL_SANDBOX_TOKEN; beyond the loopback interface it has to be set.
    """
    from kestrl_sandbox.config import PoolConfig, default_size
    from kestrl_sandbox.contract import Isolation

    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(host):
        raise UserInputError(f"--host: {host} can be reached from elsewhere; set {TOKEN_VARIABLE}")
    if isolation not in {item.value for item in Isolation}:
        raise UserInputError(f"--isolation: there is no {isolation!r}; there are {', '.join(Isolation)}")
    config = PoolConfig(max_sandboxes=max_sandboxes or default_size(), max_waiting=max_waiting, memory_mb=memory_mb)
    asyncio.run(_serve(host, port, token, backend, Isolation(isolation), config))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(
    host: str, port: int, token: str | None, backend: str, isolation: Isolation, config: PoolConfig
) -> None:
    from aiohttp import web

    from kestrl_sandbox.backends import open_sandbox
    from kestrl_sandbox.remote.server import application

    pool = await open_sandbox(config, least=isolation, backend=backend)
    runner = web.AppRunner(application(pool, token), handler_cancellation=True, access_log=None)
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
        guard = "with the token of " + TOKEN_VARIABLE if token else "without a token"
        found = pool.capabilities
        typer.echo(f"serving on {address} {guard}; {found.backend}, isolates by {found.isolation}")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await runner.cleanup()
        await pool.close()


async def _check(backend: str, area: str, *, verbose: bool) -> int:
    from kestrl_sandbox.backends import open_sandbox
    from kestrl_sandbox.checks.hostile import CHECKS
    from kestrl_sandbox.checks.verdicts import Report, examine, neighbours
    from kestrl_sandbox.config import PoolConfig

    chosen = [item for item in CHECKS if not area or item.area == area]
    if not chosen and area != "tenancy":
        raise UserInputError(f"--area: there is no area {area!r}; there are {AREAS}")
    console = Console()
    opened = await open_sandbox(PoolConfig(max_sandboxes=4, memory_mb=256, disk_mb=16, inodes=512), backend=backend)
    try:
        found = opened.capabilities
        console.print(f"back-end {found.backend}: isolates by {found.isolation}, ready in {found.start_seconds:.2f} s")
        for name, text in found.mechanisms.items():
            console.print(f"  {name}: {text}", markup=False, highlight=False)
        report = Report()
        async for verdict in examine(opened, chosen):
            report.verdicts.append(verdict)
        if area in {"", "tenancy"}:
            report.verdicts.append(await neighbours(opened))
    finally:
        await opened.close()
    _print(console, report, verbose=verbose)
    return 1 if report.breaches else 0


def _print(console: Console, report: object, *, verbose: bool) -> None:
    from kestrl_sandbox.checks.verdicts import Report

    assert isinstance(report, Report)
    table = Table("area", "held", "of", "seconds", box=None)
    for area in dict.fromkeys(verdict.check.area for verdict in report.verdicts):
        those = [verdict for verdict in report.verdicts if verdict.check.area == area]
        held = sum(verdict.held for verdict in those)
        table.add_row(area, str(held), str(len(those)), f"{sum(verdict.seconds for verdict in those):.1f}")
    console.print(table)
    for verdict in report.verdicts:
        if verbose or not verdict.held:
            mark = "held" if verdict.held else "NOT HELD"
            line = f"{mark}: {verdict.check.area}: {verdict.check.name}: {verdict.problem or verdict.detail}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
