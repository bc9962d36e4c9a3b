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

from kestrl._app.local.progress import (
    SHOWN_FIRST,
    clock,
    failure_counts,
    idle_words,
    one_line,
    policy_words,
    step_words,
    warnings,
)
from kestrl._app.local.supervisor import Observed
from kestrl.runstate.state import RunState
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

    def update(self, state: RunState, components: Mapping[str, Observed]) -> None: ...


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

    def update(self, state: RunState, components: Mapping[str, Observed]) -> None:
        for name, seen in components.items():
            if seen.restarts > self._restarts.get(name, 0):
                self._restarts[name] = seen.restarts
                self.say(f"{name} ended ({seen.last_exit}) and is restarted: {seen.last_error}")
        if state.learning.learned is False and not self._warned:
            self._warned = True
            self.say(f"warning: nothing is learned: {state.learning.message}")
        if state.learning.warning and not self._warned_of_loss:
            self._warned_of_loss = True
            self.say(f"warning: {state.learning.warning}")
        if state.tools.warning and not self._warned_of_tools:
            self.say(f"warning: tools: {state.tools.warning}")
        self._warned_of_tools = bool(state.tools.warning)
        if state.storage.wait != self._waiting:
            self._waiting = state.storage.wait
            self.say(f"waiting: {self._waiting}" if self._waiting else "storage is available again")
        key = (state.activity.phase or RunPhase.STARTING, state.steps.done, state.activity.message)
        if key == self._shown and time.monotonic() - self._at < PLAIN_SECONDS:
            return
        if key == self._shown and key[0] is not RunPhase.STARTING:
            if state.gathering.episodes > self._gathered:
                self._gathered, self._at = state.gathering.episodes, time.monotonic()
                self.say(state.gathering.line())
            return
        self._gathered = 0
        self._shown, self._at = key, time.monotonic()
        self.say(one_line(state))


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

    def update(self, state: RunState, components: Mapping[str, Observed]) -> None:
        self._live.update(self._draw(state, components))

    def _draw(self, state: RunState, components: Mapping[str, Observed]) -> Panel:
        bar = Table.grid(expand=True)  # a bare bar ends without a newline, and the next row would be cropped
        bar.add_row(ProgressBar(total=max(1, state.steps.total), completed=state.steps.done))
        head = Text(safe_line(f"{step_words(state)}   {state.activity.message}"))
        facts = _facts(state, time.monotonic() - self._started)
        counts = state.history.failures
        failures = [Text(safe_line(f"failures {failure_counts(counts)}"))] if counts else []
        # On a separate line: a long cell would narrow the other columns.
        warning_lines = [Text(safe_line(warning), style="yellow") for warning in warnings(state)]
        rollouts = [Text(safe_line(state.gathering.line()))] if state.gathering.wanted else []
        idle = [Text(f"idle {words}")] if (words := idle_words(state.last_step.idle)) else []
        lines = Group(head, bar, facts, *idle, *rollouts, *failures, *warning_lines, _components(components))
        return Panel(lines, title=Text(self._title), title_align="left")


def _facts(state: RunState, elapsed: float) -> Table:
    table = Table.grid(padding=(0, 3))
    first = [f"{name} [bold]{state.means[name]:.3f}[/]" for name in SHOWN_FIRST if name in state.means]
    if first:
        table.add_row(*first)
    last = state.last_step
    table.add_row(
        f"policy [bold]{policy_words(state)}[/] proved {state.engines.verified}/{state.engines.total}",
        f"{last.tokens_per_second:.0f} tokens/s",
        f"{clock(elapsed)} elapsed" + (f", {clock(last.eta_seconds)} to go" if last.eta_seconds else ""),
    )
    return table


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
