"""Commands for a run: status, logs, episodes, stop. They read the files of the run, so they also work after it
ended.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kestrl._app.cli.options import DEFAULT_RUNS, RunId, Runs
from kestrl._app.local.logs import LOG_BYTES, Follower, tail
from kestrl._app.local.progress import clock, means_line, step_words
from kestrl._app.local.report import transcript
from kestrl._app.local.rundir import RunDir, find_run
from kestrl._app.local.runner_record import ComponentRecord, RunnerRecord
from kestrl._app.local.secrets import open_storage
from kestrl._app.local.site import storage_address
from kestrl._shared.checking import DecodeRequest, ask
from kestrl.episode import Episode, Group, Purpose, Row
from kestrl.errors import KestrlError, StorageError, UserInputError
from kestrl.runstate.state import RunState
from kestrl.runstate.states import ComponentState, LocalRunState, RunPhase
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import DAMAGED, EpisodeFilter, ObjectEpisodeStore, StoredEpisode
from kestrl.storage.summary import RunSummary
from kestrl.terminal import safe, safe_line

console = Console()
DECODE_SECONDS = 60.0
STOP_SECONDS = 120.0
FINISHED = {RunPhase.SUCCEEDED: LocalRunState.SUCCEEDED, RunPhase.FAILED: LocalRunState.FAILED}
PURPOSES = {"train": Purpose.TRAIN, "eval": Purpose.EVALUATION}
episodes = typer.Typer(no_args_is_help=True, help="Inspect the episodes of a run.")


def run_store(run: RunDir) -> ObjectStore:
    """The storage of a run."""
    job, base = run.job(), run.manifest_dir
    return open_storage(job, base, storage_address(job, run, base), create=False)


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """A run as observed: whether it is alive follows from the lock on its folder, not from a file's content."""

    run: RunDir
    pid: int | None
    """The live runner's."""
    record: RunnerRecord | None
    summary: RunSummary | None

    @property
    def state(self) -> LocalRunState:
        if self.pid is not None:
            return LocalRunState.RUNNING
        if self.summary is not None and self.summary.status in FINISHED:
            return FINISHED[self.summary.status]
        if self.record is None:
            return LocalRunState.NEVER_STARTED
        return LocalRunState.DEAD if self.record.ended is None else LocalRunState.STOPPED

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.id,
            "state": self.state,
            "pid": self.pid,
            "record": {} if self.record is None else self.record.to_json(),
            "summary": {} if self.summary is None else self.summary.to_json(),
        }


def observe(run: RunDir) -> ObservedRun:
    """Observes a run.

    Raises:
        UserInputError: A file of the run is damaged.
    """
    return ObservedRun(run, run.runner_pid(), run.record(), run.summary())


def _advice(run: RunDir, state: LocalRunState) -> str:
    here = shlex.join(["--runs", str(run.path.parent)])
    advice = "run the same command again to resume from the last checkpoint"
    return {
        LocalRunState.RUNNING: f"follow it: kestrl logs {run.id} {here} --follow; end it: kestrl stop {run.id} {here}",
        LocalRunState.SUCCEEDED: f"use it: kestrl eval {run.id} {here}; kestrl export {run.id} {here} --out adapter",
        LocalRunState.FAILED: f"see: kestrl logs {run.id} {here}; fix the cause and run the same command again to "
        "resume",
        LocalRunState.STOPPED: advice,
        LocalRunState.DEAD: f"its runner ended without a record (killed?); {advice}",
        LocalRunState.NEVER_STARTED: "run the same command again",
    }[state]


def status(
    run_id: RunId = None,
    runs: Runs = DEFAULT_RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the state of a run: progress, components, failures, and the next command."""
    run = find_run(runs, run_id)
    known = observe(run)
    if as_json:
        typer.echo(json.dumps(known.as_json(), indent=2))
        return
    record, summary = known.record or RunnerRecord(), known.summary
    console.print(f"[bold]{run.id}[/] {known.state}" + (f" (pid {known.pid})" if known.pid else ""))
    if record.state is not None:
        _print_state(record.state, alive=known.pid is not None)
    _print_components(record, alive=known.pid is not None)
    last = record.state or RunState()
    failures = (summary.failures if summary is not None else {}) or last.history.failures
    for name, count in sorted(failures.items()):
        console.print(safe_line(f"failures {name}: {count}"), markup=False)
    reason = (summary.reason if summary is not None else "") or record.reason or last.activity.failure
    if reason:
        console.print(safe(f"reason: {reason}"), markup=False, soft_wrap=True)
    console.print(_advice(run, known.state), markup=False, soft_wrap=True, highlight=False)


def _print_state(state: RunState, *, alive: bool) -> None:
    console.print(safe_line(f"{step_words(state)}  {means_line(state.means)}"), markup=False)
    version = "none yet" if state.policy.version is None else state.policy.version.name
    console.print(f"policy {version} proved {state.engines.verified}/{state.engines.total}", markup=False)
    for name, used in sorted(state.tools.sandboxes.items()):
        console.print(safe_line(f"sandbox of {name}: {used}"), markup=False, highlight=False)
    if alive and state.last_step.eta_seconds:
        console.print(f"{clock(state.last_step.eta_seconds)} to go")
    if alive and state.storage.wait:
        console.print(safe(f"waiting: {state.storage.wait}"), markup=False, soft_wrap=True)


def _print_components(record: RunnerRecord, *, alive: bool) -> None:
    if not record.components:
        return
    on_devices = any(seen.devices for seen in record.components.values())
    columns = ("state", "pid", *(("devices",) if on_devices else ()), "metrics", "restarts", "last exit", "last error")
    table = Table("component", *columns)
    for name, seen in record.components.items():
        table.add_row(
            name,
            seen.state if alive else ComponentState.GONE,
            str(seen.pid or "") if alive else "",
            *((", ".join(seen.devices),) if on_devices else ()),
            _metrics_port(seen) if alive else "",
            str(seen.restarts),
            "" if seen.last_exit is None else str(seen.last_exit),
            Text(safe(seen.last_error[:200])),
        )
    console.print(table)


def _metrics_port(seen: ComponentRecord) -> str:
    """Port of a component's Prometheus endpoint; an engine serves metrics on its HTTP port."""
    return str(seen.ports.get("metrics") or seen.ports.get("http") or "")


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
    chosen = {name: path for name, path in paths.items() if component in {None, name}}
    followers = {name: Follower(path, at_end=True) for name, path in chosen.items()} if follow else {}
    for name, path in chosen.items():
        kept = deque(tail(path, LOG_BYTES).decode(errors="replace").splitlines(), maxlen=lines)
        for line in kept:
            typer.echo(f"{name} | {safe(line)}")
    if follow:
        _follow(run, followers, only=component)


def _follow(run: RunDir, followers: dict[str, Follower], *, only: str | None) -> None:
    """Prints appended lines until the runner ends, across rotations and including components that start later."""
    while True:
        gone = run.runner_pid() is None  # read before the logs, so that everything written until then is printed
        for path in sorted((run.path / "logs").glob("*.log")):
            if only in {None, path.stem} and path.stem not in followers:
                followers[path.stem] = Follower(path, at_end=False)
        for name, follower in followers.items():
            for line in follower.lines():
                typer.echo(f"{name} | {safe(line)}")
        if gone:
            return
        time.sleep(0.3)


def stored_episodes(store: ObjectStore, chosen: EpisodeFilter) -> Iterator[StoredEpisode]:
    """The selected episodes of a run.

    Raises:
        UserInputError: A stored object is damaged: a person restores it, like any damaged file of a run.
    """
    try:
        yield from ObjectEpisodeStore(store).select(chosen)
    except StorageError as error:
        raise UserInputError(str(error)) if error.code == DAMAGED else error from error


def _purpose(given: str) -> Purpose:
    if given not in PURPOSES:
        raise UserInputError(f"--purpose: {given!r} is neither train nor eval")
    return PURPOSES[given]


@episodes.command("list")
def list_episodes(
    run_id: RunId = None,
    purpose: Annotated[str, typer.Option(help="train or eval.")] = "train",
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only attempts at the scenario with this id.")] = None,
    failed: Annotated[
        bool | None, typer.Option("--failed/--not-failed", help="Only episodes that failed, or only others.")
    ] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """List stored episodes, one line each."""
    chosen = EpisodeFilter(purpose=_purpose(purpose), step=step, scenario=scenario, failed=failed)
    for stored in stored_episodes(run_store(find_run(runs, run_id)), chosen):
        episode = stored.episode
        reward = "-" if episode.reward is None else f"{episode.reward:.3f}"
        failure = safe_line(f" {episode.failure}") if episode.failure else ""
        typer.echo(
            f"{episode.id}  step {stored.step}  reward {reward}  turns {episode.num_turns}  "
            f"{episode.stop_reason}{failure}"
        )


def find_episode(run: RunDir, episode_id: str) -> StoredEpisode:
    """A stored episode by its id.

    Raises:
        UserInputError: There is no episode with this id.
    """
    found = next(stored_episodes(run_store(run), EpisodeFilter(id=episode_id)), None)
    if found is None:
        raise UserInputError(f"no stored episode has the id {episode_id!r}; see `kestrl episodes list`")
    return found


@episodes.command("show")
def show_episode(
    episode_id: Annotated[str, typer.Argument(help="Episode id, as printed by `episodes list`.")],
    run_id: Annotated[str | None, typer.Option("--run", help="Run id (default: the latest run).")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also print every token with its mask, log-prob and policy version.")
    ] = False,
    prompt: Annotated[
        bool,
        typer.Option("--prompt", help="Also print the prompt and the sampled text of every row, with control tokens."),
    ] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Also print what judge models were sent for its group, and their replies.")
    ] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print an episode: its turns, tool calls and rewards."""
    run = find_run(runs, run_id)
    _, _, group, episode = find_episode(run, episode_id)
    began = datetime.fromtimestamp(episode.started_at, UTC).isoformat(timespec="seconds")
    typer.echo(
        safe_line(
            f"episode {episode.id} of scenario {group.scenario.id}, {began}, {episode.seconds:.2f} s, engine "
            f"{episode.engine}"
        )
    )
    typer.echo(
        f"policy {episode.policy.name if episode.policy else 'base'}  seed {episode.seed}  trace "
        f"{episode.trace_id or '-'}"
    )
    typer.echo(safe(f"ground truth: {json.dumps(group.scenario.ground_truth, ensure_ascii=False)}"))
    for line in transcript(episode):
        typer.echo(line)
    for call in episode.tool_calls:
        typer.echo(
            safe_line(f"  turn {call.turn} call {call.name or '?'} {call.outcome} in {call.seconds * 1000:.1f} ms")
        )
    for name, state in sorted(episode.environments.items()):
        typer.echo(safe_line(f"  environment {name}: {json.dumps(state, ensure_ascii=False)}"))
    for name, reported in sorted(episode.info.items()):
        typer.echo(safe_line(f"  info {name}: {json.dumps(reported, ensure_ascii=False)}"))
    for name, value in sorted(episode.rewards.items()):
        typer.echo(safe_line(f"  reward {name}: {value:.4f}"))
    for name, value in sorted(episode.metrics.items()):
        typer.echo(safe_line(f"  metric {name}: {value:.4f}"))
    if episode.answer is not None:
        typer.echo(safe_line(f"  answer: {json.dumps(episode.answer, ensure_ascii=False)}"))
    for name, details in sorted(episode.scoring.items()):
        typer.echo(safe_line(f"  {name}: {json.dumps(details, ensure_ascii=False)}"))
    if judge:
        for line in _judge_lines(group):
            typer.echo(line)
    if prompt:
        for line in _engine_lines(run, episode):
            typer.echo(line)
    if tokens:
        for number, row in enumerate(episode.rows):
            for line in _token_lines(number, row, episode):
                typer.echo(line)


def _judge_lines(group: Group) -> Iterator[str]:
    """Every request to a judge model for a group, with its reply or why there was none."""
    for name, details in sorted(group.scoring.items()):
        if "skipped" in details:
            yield safe_line(f"{name}: not asked, {details['skipped']}")
        for call in details.get("calls", ()):
            shown = ", ".join(f"{one} is {'/'.join(ids)}" for one, ids in zip(call["ids"], call["order"], strict=True))
            yield safe_line(f"{name}: {call['model']}, order by seed {call['seed']}: {shown}")
            for message in call["messages"]:
                yield safe(f"{message['role']}: {message['content']}")
            yield safe(f"reply: {call.get('content', '')}" if "error" not in call else f"no scores: {call['error']}")


def _engine_lines(run: RunDir, episode: Episode) -> Iterator[str]:
    """Every row as text, split into given and sampled parts."""
    parts: list[tuple[int, bool, list[int]]] = []
    for number, row in enumerate(episode.rows):
        start = 0
        for sampled, places in groupby(row.mask):
            end = start + sum(1 for _ in places)
            parts.append((number, bool(sampled), list(row.token_ids[start:end])))
            start = end
    settings = run.read_json("settings/rollout-0.json")
    if settings is None:
        raise UserInputError(f"--prompt needs {run.path}/settings/rollout-0.json, which names the tokenizer")
    request = DecodeRequest(tokenizer=str(settings["tokenizer"]), ids=[ids for _, _, ids in parts])
    report = ask("kestrl_rollout.decode", request, subject="the tokenizer", seconds=DECODE_SECONDS)
    if report.missing:
        raise UserInputError(f"--prompt needs the tokenizer of {report.missing}; install it in this environment")
    if report.problems:
        raise UserInputError("\n".join(report.problems))
    for (number, sampled, ids), text in zip(parts, report.facts["texts"], strict=True):
        yield f"row {number}, {len(ids)} tokens {'sampled' if sampled else 'given'}:"
        yield safe(str(text))


def _token_lines(number: int, row: Row, episode: Episode) -> Iterator[str]:
    """Position, id, mask, behaviour log-prob and policy of every token of a row."""
    spans = [(turn.start, turn.end, turn.policy) for turn in episode.turns if turn.row == number]
    yield f"row {number}: {len(row.token_ids)} tokens, {sum(row.mask)} sampled"
    for position, (token, sampled, logprob) in enumerate(zip(row.token_ids, row.mask, row.logprobs, strict=True)):
        policy = next((name for start, end, name in spans if start <= position < end), "")
        value = f"{logprob:.6f}" if sampled else "-"
        yield f"  {position:5d}  id {token:6d}  mask {sampled}  logprob {value:>12}  {policy}".rstrip()


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


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(logs)
    app.command()(stop)
    app.add_typer(episodes, name="episodes")
