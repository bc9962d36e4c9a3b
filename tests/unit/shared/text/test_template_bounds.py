"""Chat templates as programs that nobody vouches for: bounded in time and memory, and gone with their owner."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kestrl._shared.text import renderer
from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.text.chat_template import ChatTemplate
from kestrl.errors import UserInputError

NOW = datetime(2026, 1, 2, tzinfo=UTC)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SECONDS = 0.3
GROW = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x "
    "= ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}"
)
LONG = "{% for a in range(9999) %}{% for b in range(9999) %}abcdefgh{% endfor %}{% endfor %}"
RECURSE = "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}"


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize(
    ("source", "seconds", "why"),
    [
        (LOOP, SECONDS, "more than 0.3 s of processor time"),
        (GROW, 5.0, "more than 1024 MiB of memory"),
        ("{{ 'a' * 99999999999 }}", 5.0, "more than 1024 MiB of memory"),
        (LONG, SECONDS, "more than 0.3 s"),
        (RECURSE, 5.0, "recurses without end"),
    ],
)
def test_a_template_without_end_is_a_typed_failure(source: str, seconds: float, why: str) -> None:
    with pytest.raises(UserInputError, match=why) as caught:
        ChatTemplate(source, {}, started=NOW, cpu_seconds=seconds).render(
            [{"role": "user", "content": "x"}], (), generate=True
        )
    assert caught.value.code == "template_unbounded"
    assert "name another with agent.template" in str(caught.value)


def test_one_shape_without_end_leaves_the_others_usable() -> None:
    source = "{% if messages | length > 1 %}" + LOOP + "{% endif %}ok"
    template = ChatTemplate(source, {}, started=NOW, cpu_seconds=SECONDS)
    one = [{"role": "user", "content": "x"}]
    for _ in range(2):
        assert template.render(one, (), generate=True).text == "ok"
        with pytest.raises(UserInputError, match="processor time"):
            template.render(one * 2, (), generate=True)
    assert template.render(one, (), generate=True).text == "ok"


def test_a_template_that_outgrows_its_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    render = renderer.compiled({"source": "{{ 'a' * 100 }}", "variables": {}, "started": NOW.isoformat()})
    conversation = {"messages": [], "tools": [], "generate": True}
    assert len(render(conversation)) == 100
    monkeypatch.setattr(renderer, "LONGEST", 99)
    assert renderer.answer(lambda: render(conversation), 1.0) == {"unbounded": "it needs more than 1024 MiB of memory"}


def test_the_renderer_is_gone_with_its_template() -> None:
    before = children()
    template = ChatTemplate("ok", {}, started=NOW)
    (child,) = children() - before
    del template
    gc.collect()
    assert child not in children()
    assert not Path(f"/proc/{child}").exists()


def test_a_closed_template_has_no_renderer_until_it_is_used_again() -> None:
    before = children()
    template = ChatTemplate("ok", {}, started=NOW)
    template.close()
    template.close()
    assert children() == before
    assert template.render([], [], generate=True).text == "ok"


def test_a_model_is_gone_with_its_last_user(load: Callable[..., ChatModel]) -> None:
    """By itself, not by a garbage collection, which may come long after."""
    before = children()
    model = load()
    model.chat.prompt([Message(role="user", text="x")], model.chat.toolset([]))
    (child,) = children() - before
    gc.disable()
    try:
        del model
        assert child not in children()
    finally:
        gc.enable()


def test_the_renderer_has_no_credential_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_ROLLOUT_TOKEN", "secret")
    monkeypatch.setenv("LANGUAGE", "en")
    before = children()
    template = ChatTemplate("ok", {}, started=NOW)
    (child,) = children() - before
    variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    assert b"LANGUAGE=en" in variables
    assert not [variable for variable in variables if variable.startswith(b"KESTRL_")]
    assert template.render([], [], generate=True).text == "ok"
