"""Views of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Thread
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
    sparkline,
    step_words,
    warnings,
)
from kestrl._app.local.supervisor import ObservedChild
from kestrl.runstate.state import RunState
from kestrl.runstate.states import ComponentState, RunPhase
from kestrl.terminal import safe, safe_line

PLAIN_SECONDS = 15.0
"""Minimum seconds between lines about rollouts without a terminal, beside one line for each step and phase."""
START_SECONDS = 60.0
"""Seconds between lines about what a start waits for, without a terminal."""
SHOWN_STEPS = 40
"""Steps of the curve in the panel."""
Verdict = Callable[[], str]
"""What became of the last stored episode, in one line; it may block."""


class View(Protocol):
    """Shows progress and components as they change."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        ...

    def update(self, state: RunState, components: Mapping[str, ObservedChild]) -> None: ...


class PlainView:
    """Prints a line for every change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, int, str] | None = None
        self._restarts: dict[str, int] = {}
        self._at = self._since = 0.0
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

    def update(self, state: RunState, components: Mapping[str, ObservedChild]) -> None:
        for name, child in components.items():
            if child.restarts > self._restarts.get(name, 0):
                self._restarts[name] = child.restarts
                self.say(f"{name} ended ({child.last_exit}) and is restarted: {child.last_error}")
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
        if key != self._shown:
            self._gathered = 0
            self._shown, self._at, self._since = key, time.monotonic(), time.monotonic()
            self.say(one_line(state))
        elif key[0] is RunPhase.STARTING:
            self._say_awaited(components)
        elif time.monotonic() - self._at >= PLAIN_SECONDS and state.gathering.episodes > self._gathered:
            self._gathered, self._at = state.gathering.episodes, time.monotonic()
            self.say(state.gathering.line())

    def _say_awaited(self, components: Mapping[str, ObservedChild]) -> None:
        """Prints what a long start waits for."""
        if time.monotonic() - self._at < START_SECONDS:
            return
        self._at = time.monotonic()
        awaited = [name for name, child in components.items() if child.state is not ComponentState.RUNNING]
        self.say(f"starting for {clock(self._at - self._since)}, waiting for {', '.join(awaited) or 'the learner'}")


class LiveView:
    """A panel that is redrawn in place by the clock, above which a line for each step stays.

    Args:
        console: The terminal.
        title: Title of the panel.
        verdict: What became of the last stored episode.
    """

    def __init__(self, console: Console, title: str, verdict: Verdict | None = None) -> None:
        self._title, self._verdict_of = title, verdict
        self._started = self._since = time.monotonic()
        self._state, self._components = RunState(), dict[str, ObservedChild]()
        self._rewards: deque[float] = deque(maxlen=SHOWN_STEPS)
        self._verdict, self._reading = "", Thread()
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(safe(line), highlight=False, markup=False, soft_wrap=True)

    def update(self, state: RunState, components: Mapping[str, ObservedChild]) -> None:
        previous_state, self._state, self._components = self._state, state, dict(components)
        if (state.activity, state.steps) != (previous_state.activity, previous_state.steps):
            self._since = time.monotonic()
        if state.steps.done > previous_state.steps.done:
            if "reward" in state.means:
                self._rewards.append(state.means["reward"])
            if previous_state.steps.total:  # the first report of a resumed run is no step of this process
                self.say(one_line(state))
            self._read_verdict()

    def _read_verdict(self) -> None:
        """Reads the verdict beside the drawing, since storage may answer slowly; one at a time."""
        if self._verdict_of is None or self._reading.is_alive():
            return
        verdict = self._verdict_of

        def read() -> None:
            self._verdict = verdict()

        self._reading = Thread(target=read, daemon=True)
        self._reading.start()

    def _draw(self) -> Panel:
        state, now = self._state, time.monotonic()
        bar = Table.grid(expand=True)  # a bare bar ends without a newline, and the next row would be cropped
        bar.add_row(ProgressBar(total=max(1, state.steps.total), completed=state.steps.done))
        head = f"{step_words(state)}   {clock(now - self._since)}   {state.activity.message}"
        facts = _facts(state, now - self._started)
        below = [f"idle {words}"] if (words := idle_words(state.last_step.idle)) else []
        below += [state.gathering.line()] if state.gathering.wanted else []
        if len(self._rewards) > 1:
            below.append(f"reward {sparkline(self._rewards)} last {len(self._rewards)} steps")
        if state.history.failures:
            below.append(f"failures {failure_counts(state.history.failures)}")
        if self._verdict:
            below.append(f"last episode {self._verdict}")
        # On separate lines: a long cell would narrow the other columns.
        warning_lines = [Text(safe_line(warning), style="yellow") for warning in warnings(state)]
        texts = [Text(safe_line(line)) for line in below]
        content = Group(Text(safe_line(head)), bar, facts, *texts, *warning_lines, _components(self._components))
        return Panel(content, title=Text(self._title), title_align="left")


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


def _components(components: Mapping[str, ObservedChild]) -> Text:
    text = Text()
    for name, child in components.items():
        style = (
            "green"
            if child.state is ComponentState.RUNNING
            else "yellow"
            if child.state is ComponentState.STARTING
            else "red"
        )
        text.append(f"{name} ", style=style)
        if child.restarts:
            text.append(f"(restarted {child.restarts}x) ", style="yellow")
    return text


def make_view(console: Console, title: str, verdict: Verdict | None = None) -> View:
    """View for the kind of output."""
    return LiveView(console, title, verdict) if console.is_terminal else PlainView(console)
