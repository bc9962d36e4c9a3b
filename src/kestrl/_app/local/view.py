"""Views of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kestrl._app.local.progress import SHOWN_FIRST, Progress, clock, one_line
from kestrl._app.local.supervisor import Observed
from kestrl.runstate.states import ComponentState, RunPhase
from kestrl.terminal import safe, safe_line

PLAIN_SECONDS = 15.0
"""Minimum seconds between lines without a terminal, beside one line for each step and phase."""


class View(Protocol):
    """Shows progress and components as they change."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        ...

    def update(self, progress: Progress, components: Mapping[str, Observed]) -> None: ...


class PlainView:
    """Prints a line for every change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, int, str] | None = None
        self._restarts: dict[str, int] = {}
        self._at = 0.0
        self._gathered = 0
        """Episodes in the last printed line about rollouts."""
        self._warned = self._warned_of_loss = self._warned_of_tools = False
        self._waiting = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, line: str) -> None:
        self._console.print(safe(line), highlight=False, markup=False, soft_wrap=True)

    def update(self, progress: Progress, components: Mapping[str, Observed]) -> None:
        for name, seen in components.items():
            if seen.restarts > self._restarts.get(name, 0):
                self._restarts[name] = seen.restarts
                self.say(f"{name} ended ({seen.last_exit}) and is restarted: {seen.last_error}")
        if progress.not_learned and not self._warned:
            self._warned = True
            self.say(f"warning: nothing is learned: {progress.not_learned}")
        if progress.learning_warning and not self._warned_of_loss:
            self._warned_of_loss = True
            self.say(f"warning: {progress.learning_warning}")
        if progress.tool_warning and not self._warned_of_tools:
            self.say(f"warning: tools: {progress.tool_warning}")
        self._warned_of_tools = bool(progress.tool_warning)
        if progress.storage_wait != self._waiting:
            self._waiting = progress.storage_wait
            self.say(f"waiting: {self._waiting}" if self._waiting else "storage is available again")
        key = (progress.phase, progress.step, progress.message)
        if key == self._shown and time.monotonic() - self._at < PLAIN_SECONDS:
            return
        if key == self._shown and progress.phase is not RunPhase.STARTING:
            if progress.gathering.episodes > self._gathered:
                self._gathered, self._at = progress.gathering.episodes, time.monotonic()
                self.say(progress.gathering.line())
            return
        self._gathered = 0
        self._shown, self._at = key, time.monotonic()
        self.say(one_line(progress))


class LiveView:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(safe(line), highlight=False, markup=False, soft_wrap=True)

    def update(self, progress: Progress, components: Mapping[str, Observed]) -> None:
        self._live.update(self._draw(progress, components))

    def _draw(self, progress: Progress, components: Mapping[str, Observed]) -> Panel:
        bar = Table.grid(expand=True)  # a bare bar ends without a newline, and the next row would be cropped
        bar.add_row(ProgressBar(total=max(1, progress.total_steps), completed=progress.step))
        head = Text(safe_line(f"{progress.phase}   step {progress.step}/{progress.total_steps}   {progress.message}"))
        # On a separate line: a long cell would narrow the other columns.
        warnings = [f"waiting: {progress.storage_wait}"] if progress.storage_wait else []
        warnings += [f"nothing is learned: {progress.not_learned}"] if progress.not_learned else []
        warnings += [progress.learning_warning] if progress.learning_warning else []
        warnings += [f"tools: {progress.tool_warning}"] if progress.tool_warning else []
        facts = _facts(progress, time.monotonic() - self._started)
        failures = [Text(safe_line(_failures(progress)))] if progress.failures else []
        warning_lines = [Text(safe_line(warning), style="yellow") for warning in warnings]
        rollouts = [Text(safe_line(progress.gathering.line()))] if progress.gathering.wanted else []
        lines = Group(head, bar, facts, *rollouts, *failures, *warning_lines, _components(components))
        return Panel(lines, title=Text(self._title), title_align="left")


def _facts(progress: Progress, elapsed: float) -> Table:
    table = Table.grid(padding=(0, 3))
    first = [f"{name} [bold]{progress.means[name]:.3f}[/]" for name in SHOWN_FIRST if name in progress.means]
    if first:
        table.add_row(*first)
    policy = f"v{progress.policy.step}" if progress.policy else "none yet"
    table.add_row(
        f"policy [bold]{policy}[/] proved {progress.engines_converged}/{progress.engines_total}",
        f"{progress.tokens_per_second:.0f} tokens/s",
        f"{clock(elapsed)} elapsed" + (f", {clock(progress.eta_seconds)} to go" if progress.eta_seconds else ""),
    )
    return table


def _failures(progress: Progress) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(progress.failures.items()))
    return f"failures {counts}"


def _components(components: Mapping[str, Observed]) -> Text:
    text = Text()
    for name, seen in components.items():
        style = (
            "green"
            if seen.state is ComponentState.RUNNING
            else "yellow"
            if seen.state is ComponentState.STARTING
            else "red"
        )
        text.append(f"{name} ", style=style)
        if seen.restarts:
            text.append(f"(restarted {seen.restarts}x) ", style="yellow")
    return text


def make_view(console: Console, title: str) -> View:
    """View for the kind of output."""
    return LiveView(console, title) if console.is_terminal else PlainView(console)
