"""Templates that write a turn anew once more follows it, as those of QwQ and DeepSeek-R1 do: every turn has its row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.small_models import OWN_TEMPLATE, SHARED_TEMPLATES

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel, verify_template
from kestrl._shared.text.toolset import NO_TOOLS

USER = Message(role="user", text="Find a bird.")

# QwQ: the prompt opens the reasoning, and the history has none.
OPENED = OWN_TEMPLATE.replace(
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}",
    "{{- message.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>' }}",
).replace("{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}")
# R1: results stand behind the calls of their turn only.
BEHIND_CALLS = OPENED.replace(
    "{%- elif message.role == 'tool' %}",
    "{%- elif message.role == 'tool' and not loop.previtem.tool_calls and loop.previtem.role != 'tool' %}"
    "{{- raise_exception('a result without a call') }}{%- elif message.role == 'tool' %}",
).replace(
    "+ '<|im_end|>' }}",
    "}}{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>' }}",
)


@pytest.mark.parametrize("template", [OPENED, BEHIND_CALLS], ids=["QwQ", "R1"])
async def test_an_episode_with_tools_begins_a_row_at_every_turn(
    template: str, make_stage: Any, write_model: Callable[..., Path], call_text: Callable[..., str]
) -> None:
    stage = await make_stage(folder=write_model(template=template), offers_tools=True, tool_call_format="hermes")
    thought = "A falcon?\n</think>\n\n"
    stage.says(thought + call_text("search", word="kestrel"), thought + "A small falcon.")
    episode = await stage.episode()
    assert episode.failure is None
    assert [call.outcome for call in episode.tool_calls] == ["ok"]
    assert [turn.row for turn in episode.turns] == [0, 1]
    assert len(episode.rows) == 2
    assert all(turn.text.startswith("<think>\n") for turn in episode.turns)


@pytest.mark.parametrize(
    "path", sorted(SHARED_TEMPLATES.glob("*.jinja")) or [None], ids=lambda path: path and path.stem
)
def test_published_templates_keep_turns_before_results(path: Path | None, load: Callable[..., ChatModel]) -> None:
    if path is None:
        pytest.skip("the published templates are not here")
    model = load(template=path.read_text(encoding="utf-8"))
    assert not verify_template(model.chat, tools=True).forks


def test_a_template_that_forks_closes_turns_with_the_same_token(load: Callable[..., ChatModel]) -> None:
    model = load(template=OPENED)
    verified = verify_template(model.chat, tools=True)
    assert verified.forks
    assert [model.vocabulary.decode([end]) for end in verified.closing] == ["<|im_end|>"]
    assert model.chat.reasons([USER], NO_TOOLS)
    assert not verify_template(load(template=OPENED, tools=False).chat, tools=False).forks
