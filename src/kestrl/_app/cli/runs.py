"""Commands for a run: status, logs, stop. They read the files of the run, so they also work after it
ended.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections import deque
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kestrl._app.cli.options import DEFAULT_RUNS, RunId, Runs
from kestrl._app.local.files import write_atomic
from kestrl._app.local.logs import LOG_BYTES, LogFollower, tail
from kestrl._app.local.observation import observe
from kestrl._app.local.progress import change_line, clock, detail_lines, means_line, step_words
from kestrl._app.local.rundir import RunDir, find_run
from kestrl._app.local.runner_record import ComponentRecord, RunnerRecord
from kestrl.errors import KestrlError, UserInputError
from kestrl.runstate.state import RunState
from kestrl.runstate.states import ComponentState, LocalRunState
from kestrl.terminal import safe, safe_line

console = Console()
DECODE_SECONDS = 60.0
STOP_SECONDS = 120.0
UNKNOWN = "-"


def _advice(run: RunDir, state: LocalRunState) -> str:
    place = shlex.join(["--runs", str(run.path.parent)])
    advice = "run the same command again to resume from the last checkpoint"
    return {
        LocalRunState.RUNNING: f"follow it: kestrl logs {run.id} {place} --follow; "
        f"end it: kestrl stop {run.id} {place}",
        LocalRunState.SUCCEEDED: f"use it: kestrl eval {run.id} {place}; kestrl serve {run.id} {place}; "
        f"kestrl export {run.id} {place} --out adapter",
        LocalRunState.FAILED: f"see: kestrl logs {run.id} {place}; fix the cause and run the same command again to "
        "resume",
        LocalRunState.STOPPED: advice,
        LocalRunState.DEAD: f"its runner ended without a record (killed?); {advice}",
        LocalRunState.NEVER_STARTED: "run the same command again",
    }[state]


def status(
    run_id: RunId = None,
    runs: Runs = DEFAULT_RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    engines: Annotated[
        bool, typer.Option("--engines", help="Print what each engine did: its rate, prefill and prefix cache.")
    ] = False,
) -> None:
    """Show the state of a run: progress, components, failures, and the next command."""
    run = find_run(runs, run_id)
    observed_run = observe(run)
    if as_json:
        typer.echo(json.dumps(observed_run.as_json(), indent=2))
        return
    if engines:
        _print_engines(run, (observed_run.record or RunnerRecord()).state)
        return
    record, summary = observed_run.record or RunnerRecord(), observed_run.summary
    console.print(
        f"[bold]{run.id}[/] {observed_run.state}" + (f" (pid {observed_run.pid})" if observed_run.pid else "")
    )
    if record.state is not None:
        _print_state(record.state, alive=observed_run.pid is not None)
    if summary is not None and (change := change_line(summary.before or {}, summary.after or {})):
        line = safe_line(f"held-out questions, before -> after: {change}")
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _print_components(record, alive=observed_run.pid is not None)
    for name, words in record.followers.items():
        console.print(safe_line(f"{name}: {words}"), markup=False, highlight=False, soft_wrap=True)
    last = record.state or RunState()
    failures = (summary.failures if summary is not None else {}) or last.history.failures
    for name, count in sorted(failures.items()):
        console.print(safe_line(f"failures {name}: {count}"), markup=False)
    reason = (summary.reason if summary is not None else "") or record.reason or last.activity.failure
    if reason:
        console.print(safe(f"reason: {reason}"), markup=False, soft_wrap=True)
    console.print(_advice(run, observed_run.state), markup=False, soft_wrap=True, highlight=False)


def _print_state(state: RunState, *, alive: bool) -> None:
    console.print(safe_line(f"{step_words(state)}  {means_line(state.means)}"), markup=False)
    for line in detail_lines(state):
        console.print(safe_line(line), markup=False, highlight=False, soft_wrap=True)
    if alive and state.last_step.eta_seconds:
        console.print(f"{clock(state.last_step.eta_seconds)} to go")
    for wait in (state.storage.wait, state.tools.wait):
        if alive and wait:
            console.print(safe(f"waiting: {wait}"), markup=False, soft_wrap=True)


def _print_engines(run: RunDir, state: RunState | None) -> None:
    """Prints a table of what each engine did in the run."""
    work = {} if state is None else state.history.work
    if not work:
        console.print(f"{run.id} has no counts of engines yet: they are taken at the end of each step", markup=False)
        return
    table = Table("engine", "sampled", "tokens/s", "prefill", "prompts", "cached", "at best")
    for name, did in sorted(work.items()):
        rate = did.tokens_per_second
        table.add_row(
            safe_line(name),
            f"{did.sampled_tokens:,}",
            UNKNOWN if rate is None else f"{rate:,.0f}",
            _share(did.prefill_share),
            f"{did.prompt_tokens:,}",
            _share(did.cached_share),
            _share(did.repeated_share),
        )
    console.print(table)


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _print_components(record: RunnerRecord, *, alive: bool) -> None:
    if not record.components:
        return
    on_devices = any(component.devices for component in record.components.values())
    has_exits = any(component.last_exit is not None for component in record.components.values())
    columns = (
        "state",
        "pid",
        *(("devices",) if on_devices else ()),
        "metrics",
        "restarts",
        *(("exit",) if has_exits else ()),
    )
    table = Table("component", *columns)
    for name, component in record.components.items():
        table.add_row(
            name,
            component.state if alive else ComponentState.GONE,
            str(component.pid or "") if alive else "",
            *((", ".join(component.devices),) if on_devices else ()),
            _metrics_port(component) if alive else "",
            str(component.restarts),
            *(("" if component.last_exit is None else str(component.last_exit),) if has_exits else ()),
        )
    console.print(table)
    for name, component in record.components.items():  # in a column, an error would leave no other its width
        if component.last_error:
            console.print(
                safe_line(f"{name}: {component.last_error[:200]}"), markup=False, highlight=False, soft_wrap=True
            )


def _metrics_port(component: ComponentRecord) -> str:
    """Port of a component's Prometheus endpoint; an engine serves metrics on its HTTP port."""
    return str(component.ports.get("metrics") or component.ports.get("http") or "")


def logs(
    run_id: RunId = None,
    component: Annotated[
        str | None, typer.Option("--component", "-c", help="Component such as learner-0 (default: all).")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to print from the end of each log.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs.")] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print the logs of a run's components."""
    run = find_run(runs, run_id)
    paths = {path.stem: path for path in sorted((run.path / "logs").glob("*.log"))}
    if component is not None and component not in paths:
        raise UserInputError(f"run {run.id} has no log of {component!r} (there are: {', '.join(paths) or 'none'})")
    chosen_paths = {name: path for name, path in paths.items() if component in {None, name}}
    followers = {name: LogFollower(path, at_end=True) for name, path in chosen_paths.items()} if follow else {}
    for name, path in chosen_paths.items():
        last_lines = deque(tail(path, LOG_BYTES).decode(errors="replace").splitlines(), maxlen=lines)
        for line in last_lines:
            typer.echo(f"{name} | {safe(line)}")
    if follow:
        _follow(run, followers, only=component)


def _follow(run: RunDir, followers: dict[str, LogFollower], *, only: str | None) -> None:
    """Prints appended lines until the runner ends, across rotations and including components that start later."""
    while True:
        ended_run = run.runner_pid() is None  # read before the logs, so that everything written until then is printed
        for path in sorted((run.path / "logs").glob("*.log")):
            if only in {None, path.stem} and path.stem not in followers:
                followers[path.stem] = LogFollower(path, at_end=False)
        for name, follower in followers.items():
            for line in follower.lines():
                typer.echo(f"{name} | {safe(line)}")
        if ended_run:
            return
        time.sleep(0.3)


def stop(run_id: RunId = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Stop a run after its current step and a checkpoint. It can be resumed."""
    run = find_run(runs, run_id)
    pid = run.runner_pid()
    if pid is None:
        console.print(f"{run.id} is not running")
        return
    os.kill(pid, signal.SIGINT)
    console.print(f"asked {run.id} to drain; waiting for it to end")
    deadline = time.monotonic() + STOP_SECONDS
    while run.runner_pid() is not None:
        if time.monotonic() > deadline:
            raise KestrlError(
                f"{run.id} (pid {pid}) has not ended after {STOP_SECONDS:.0f} s; see `kestrl status {run.id}`"
            )
        time.sleep(0.2)
    console.print(f"{run.id} has stopped; run the same command again to resume")


def scale(
    run_id: Annotated[str, typer.Argument(help="Run id.", show_default=False)],
    number: Annotated[str, typer.Argument(help="Number of engines.", metavar="engines=N", show_default=False)],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the number of engines of a run that goes on. New ones join, and those that leave finish their turns."""
    from kestrl._app.local.engine_fleet import REQUEST, ScaleRequest, check_scale

    name, _, count = number.partition("=")
    if name != "engines" or not count.isdecimal():
        raise UserInputError(f"{number!r}: name the number of engines, such as engines=2")
    run = find_run(runs, run_id)
    if run.runner_pid() is None:
        raise UserInputError(f"{run.id} is not running; set spec.inference.replicas for its next start")
    record = run.record()
    check_scale(run.job(), int(count), None if record is None else record.engine_limit)
    write_atomic(run.path / REQUEST, ScaleRequest(engines=int(count)).model_dump_json())
    runs_option = shlex.join(["--runs", str(run.path.parent)])
    line = f"asked {run.id} for {count} engines; see them join or leave: kestrl status {run.id} {runs_option}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(logs)
    app.command()(stop)
    app.command()(scale)
