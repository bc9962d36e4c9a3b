"""Text of models, tools and users on a terminal: nothing of it is obeyed, nothing of it is hidden."""

from __future__ import annotations

import unicodedata
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kestrl._app.local.view import LiveView, PlainView
from kestrl.runstate.history import History
from kestrl.runstate.state import Activity, Learning, RunState, Steps, StoreAccess
from kestrl.runstate.states import RunPhase
from kestrl.terminal import safe, safe_line


@given(st.text(st.characters()))
def test_no_control_character_is_left(text: str) -> None:
    kept = set(safe(text)) - {"\n", "\t"}
    assert not [character for character in kept if unicodedata.category(character) in {"Cc", "Cs"}]
    assert "\n" not in safe_line(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb", "a\\u202eb"),
        ("ü [b] 世界\tx", "ü [b] 世界\tx"),
    ],
)
def test_control_characters_are_escaped_and_others_kept(text: str, shown: str) -> None:
    assert safe(text) == shown


@pytest.mark.parametrize("width", [80, 160])
def test_the_panel_shows_every_mean_and_failure_as_it_is(width: int) -> None:
    console = Console(width=width, record=True, force_terminal=True)
    state = RunState(
        activity=Activity(phase=RunPhase.TRAINING, message="\x1b[2J[/b]"),
        steps=Steps(done=3, total=10),
        means={"reward": 0.5, "answer_correct": 0.25, "num_turns": 3.0},
        history=History(failures={"engine/no_engine_proved": 2, "tool/tool_raised": 3}),
    )
    view = LiveView(console, "job [/b]")
    view.update(state, {})
    console.print(view._draw())
    printed = console.export_text()
    failures = "failures tool/tool_raised 3, engine/no_engine_proved 2"  # a line of its own, which squeezes no column
    for expected in ("reward 0.500", "answer_correct 0.250", "num_turns 3.000", failures, "[/b]"):
        assert expected in printed
    assert "\\x1b[2J" in printed


def test_a_run_that_learns_nothing_is_warned_of_once_and_in_the_panel() -> None:
    state = RunState(
        activity=Activity(phase=RunPhase.TRAINING),
        steps=Steps(done=2, total=9),
        learning=Learning(learned=False, message="in 2 steps every reward was [equal]"),
    )
    shown = StringIO()
    plain = PlainView(Console(file=shown, width=200))
    plain.update(state, {})
    plain.update(state.but(steps=Steps(done=3, total=9)), {})
    assert shown.getvalue().count("warning: nothing is learned: in 2 steps every reward was [equal]") == 1
    console = Console(file=StringIO(), width=80, record=True)
    view = LiveView(console, "job")
    view.update(state, {})
    console.print(view._draw())
    text = console.export_text()
    assert "nothing is learned: in 2 steps every reward was [equal]" in text
    assert "policy none yet" in text


def test_an_outage_of_the_storage_is_shown_while_it_lasts() -> None:
    shown = StringIO()
    plain = PlainView(Console(file=shown, width=200))
    waiting = RunState(
        activity=Activity(phase=RunPhase.TRAINING),
        steps=Steps(done=2, total=9),
        storage=StoreAccess(wait="storage does not answer: [refused]"),
    )
    for _ in range(2):
        plain.update(waiting, {})
    assert shown.getvalue().count("waiting: storage does not answer: [refused]") == 1
    console = Console(file=StringIO(), width=200, force_terminal=True)
    view = LiveView(console, "job")
    view.update(waiting, {})
    console.print(view._draw())
    assert "waiting: storage does not answer: [refused]" in console.file.getvalue()
    plain.update(waiting.but(storage=StoreAccess()), {})
    assert "storage is available again" in shown.getvalue()
