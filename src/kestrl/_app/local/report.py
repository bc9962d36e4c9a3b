"""Report at the end of a run: metrics before and after, a sample transcript, and the next commands."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kestrl._app.error_text import MOST_LINES, error_lines
from kestrl._app.local.files import write_atomic
from kestrl._app.local.progress import builds_words
from kestrl._app.local.rundir import RunDir
from kestrl._app.local.uncertainty import TESTED, Paired, different_questions, pairs_of, values_of
from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl.episode import Episode, Group, Purpose
from kestrl.errors import KestrlError, PlaceError, StorageError
from kestrl.runstate.states import RunPhase
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import EpisodeStore, ObjectEpisodeStore
from kestrl.storage.summary import RunSummary
from kestrl.terminal import safe, safe_line

ROWS = ("reward", "sampled_reward", "answer_correct", "sources_correct", "num_turns", "duration", "exceptions")
EXIT_INTERRUPTED = 130
LONGEST_LINE = 400
"""Maximum characters of a message in a transcript."""


def comparison(before: Mapping[str, Any], after: Mapping[str, Any], pairs: Mapping[str, Paired] | None = None) -> Table:
    """Table of metrics on the validation data before and after training.

    Args:
        before: Means before it.
        after: Means after it.
        pairs: Differences on the same questions, which have standard errors.
    """
    table = Table(title="Held-out questions, before and after", title_justify="left")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    further = sorted(name for name in after if name not in ROWS and isinstance(after[name], int | float))
    for name in (*ROWS, *further):
        old, new = before.get(name), after.get(name)
        if isinstance(old, int | float) and isinstance(new, int | float):
            pair = (pairs or {}).get(name)
            error = "" if pair is None or pair.standard_error is None else f" ±{pair.standard_error:.3f}"
            table.add_row(Text(safe_line(name)), f"{old:.3f}", f"{new:.3f}", f"{new - old:+.3f}{error}")
    return table


def _reward(episode: Episode) -> float:
    return episode.reward if episode.reward is not None else float("-inf")


def most_telling(before: Sequence[Group], after: Sequence[Group]) -> tuple[Group, Group] | None:
    """The question whose reward increased most, with its episodes before and after."""
    old = {group.scenario.id: group for group in before if group.episodes}
    pairs = [(old[group.scenario.id], group) for group in after if group.episodes and group.scenario.id in old]
    return max(pairs, key=lambda pair: _reward(pair[1].episodes[0]) - _reward(pair[0].episodes[0]), default=None)


def transcript(episode: Episode) -> Iterator[str]:
    """Conversation of an episode as lines of text."""
    for message in episode.messages:
        content = message.get("content") or ""
        calls = message.get("tool_calls")
        text = content if isinstance(content, str) else json.dumps(content)
        if calls:
            text += " " + json.dumps(calls, ensure_ascii=False)
        shortened = text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + " ..."
        yield safe(f"  {message.get('role', '?'):>9}: {shortened.strip()}")
    reward = "none" if episode.reward is None else f"{episode.reward:.2f}"
    yield f"  -> reward {reward}, {episode.num_turns} turns, ended by {episode.stop_reason}"
    if episode.failure is not None:
        yield safe(f"  -> failed: {episode.failure}")


def print_report(console: Console, run: RunDir, summary: RunSummary, store: ObjectStore) -> None:
    """Prints the report of a finished run."""
    gap = summary.logprob_gap
    if summary.before and summary.after:
        _print_comparison(console, summary, ObjectEpisodeStore(store))
    if gap.get("tokens"):
        console.print(
            f"log-prob difference between learner and engines on the same policy: mean {gap['mean']:.1e}, "
            f"maximum {gap['max']:.1e} nats per token",
            soft_wrap=True,
        )
    if summary.state is not None and (builds := builds_words(summary.state)):
        console.print(safe_line(f"engines: {builds}"), markup=False)
    for name, count in sorted(summary.failures.items()):
        console.print(safe_line(f"failures {name}: {count}"), markup=False)
    if summary.skipped_rows:
        console.print(f"skipped rows: {summary.skipped_rows}, whose prompts leave no room in inference.contextLength")
    if summary.learned is False:
        message = "" if summary.not_learned is None else summary.not_learned.message
        console.print(
            safe_line(f"warning: nothing was learned: {message}"), style="yellow", markup=False, soft_wrap=True
        )
    if summary.learning_warning:
        text = safe_line(f"warning: {summary.learning_warning}")
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    tools = summary.tools
    if tools.episodes:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(tools.outcomes.items()))
        per_episode = f"tool calls: {tools.calls_per_episode:.2f} per episode"
        console.print(safe_line(f"{per_episode} ({counts})" if counts else per_episode), markup=False, soft_wrap=True)
    for name, sandbox in sorted(summary.sandboxes.items()):
        console.print(safe_line(f"sandbox of {name}: {sandbox}"), markup=False)
    if summary.tool_warning is not None:
        text = safe_line(f"warning: tools: {summary.tool_warning.message}")
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    if policy := summary.policy:
        console.print(f"adapter {policy.version}\n  {policy.uri}", soft_wrap=True, highlight=False, markup=False)
        console.print(next_commands(run), soft_wrap=True, highlight=False, markup=False)


def _print_comparison(console: Console, summary: RunSummary, episodes: EpisodeStore) -> None:
    """Prints the metrics before and after training, what is certain about their change, and a question of each."""
    means, sampling = (summary.before or {}, summary.after or {}), summary.sampling
    try:
        before, after = (episodes.read(Purpose.EVALUATION, step).groups for step in (0, summary.steps))
    except (StorageError, PlaceError) as error:
        console.print(comparison(*means))
        console.print(safe(f"no standard errors and no transcript: {error}"), markup=False)
        return
    samples = 1 if sampling is None else sampling.samples
    old, new = values_of(before, samples), values_of(after, samples)
    pairs = pairs_of(old, new, [*old])
    console.print(comparison(*means, pairs))
    tested = {name: pair for name, pair in pairs.items() if name in TESTED}
    lines = [f"{name}: {pair}" for name, pair in tested.items()]
    for line in (*lines, *different_questions(tested, "before", "after")):
        console.print(safe_line(line), markup=False, highlight=False, soft_wrap=True)
    _print_transcripts(console, before, after)


def _print_transcripts(console: Console, before: Sequence[Group], after: Sequence[Group]) -> None:
    pair = most_telling(before, after)
    if pair is None:
        return
    for title, group in zip(("before", "after"), pair, strict=True):
        console.print(f"\n{title}: {safe_line(group.scenario.id)}", style="bold", markup=False)
        for line in transcript(group.episodes[0]):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print()


def next_commands(run: RunDir) -> str:
    """Commands for using the adapter, ready to paste: programs by name if the shell finds them, else by path."""
    program = _found(Path(sys.executable).with_name("kestrl"))
    where = ["--runs", str(run.path.parent)]
    commands = (["eval", run.id], ["serve", run.id], ["export", run.id, "--out", "adapter"])
    return "\n".join(["use it:", *(f"  {shlex.join([program, *command, *where])}" for command in commands)])


def page_command(run: RunDir) -> str:
    """The command that opens the page of a run."""
    program = _found(Path(sys.executable).with_name("kestrl"))
    return shlex.join([program, "ui", run.id, "--runs", str(run.path.parent)])


def _found(program: Path) -> str:
    """Name of a program if the shell resolves it to this file, else its path."""
    return program.name if shutil.which(program.name) == str(program) else str(program)


@dataclass(slots=True)
class RunOutcome:
    """How a run ended."""

    code: int
    reason: str = ""


def report_finished(console: Console, run: RunDir, summary: RunSummary | None, store: ObjectStore) -> int:
    """Prints the result of a run that has ended by itself; returns the exit code."""
    if summary is None or summary.status is not RunPhase.SUCCEEDED:
        status = "no summary" if summary is None else summary.status
        console.print(f"the learner ended without a result: {status}", style="red")
        return EXIT_FAILED
    print_report(console, run, summary, store)
    console.print(f"{summary.steps} steps in {summary.seconds:.0f} s; {run.summary_path}", soft_wrap=True)
    console.print(f"look at it: {page_command(run)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def report_unfinished(console: Console, run: RunDir, outcome: RunOutcome, summary: RunSummary | None) -> int:
    """Prints why a run has not succeeded, and the next commands; returns the exit code."""
    if outcome.code == EXIT_INTERRUPTED:
        console.print(f"{outcome.reason}; run the same command again to resume {run.id}", markup=False, soft_wrap=True)
        return outcome.code
    first, *following = error_lines(KestrlError(outcome.reason), limit=MOST_LINES - 2)
    for line in (f"error: {first}", *following):
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    if outcome.code != EXIT_INPUT:
        logs = shlex.join(["kestrl", "logs", run.id, "--runs", str(run.path.parent)])
        console.print(f"logs: {logs}", markup=False, soft_wrap=True)
        console.print(f"episodes: {page_command(run)}", markup=False, highlight=False, soft_wrap=True)
    if summary is None:
        write_atomic(run.summary_path, RunSummary(status=RunPhase.FAILED, reason=outcome.reason).text())
    return outcome.code
