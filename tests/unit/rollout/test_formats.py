"""Tool-call formats: each reads what it writes, and a chat template says which is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest
from tests.fakes.small_models import OWN_TEMPLATE, SHARED_TEMPLATES

from kestrl._shared.spec.agent import TOOL_CALL_FORMAT, Agent
from kestrl._shared.text.chat_template import ChatTemplate
from kestrl._shared.text.formats import detect
from kestrl._shared.text.parser import TurnReader
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.episode import CallOutcome
from kestrl.errors import UserInputError
from kestrl.formats import ToolCallFormat, Turn, WrittenCall
from kestrl.formats.registry import BUILT_IN, resolve
from kestrl.testing.formats import SCHEMAS, check_format, pieces_of

MakeFile = Callable[[str, str], str]
EXPECTED = {
    "qwen2_5_vl": None,  # writes neither tools nor calls
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), "hermes"),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), "qwen_xml"),
}
"""The format of each published template; a training variant has that of its original."""
CALLS = {
    "hermes": "<tool_call>\n{{ c | tojson }}\n</tool_call>",
    "qwen_xml": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() "
    "%}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>",
    "llama3_json": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "mistral": '[TOOL_CALLS] [{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "123456789"}]',
    "harmony": " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>",
    "pythonic": "[{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]",
}
"""How a template of each family writes a call."""
SKELETON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for t in m.tool_calls %}"
    "{% set c = t.function %}@{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_format_reads_what_it_writes_and_survives_damage(name: str) -> None:
    check_format(BUILT_IN[name])


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_manifest_and_the_registry_have_the_same_names(name: str) -> None:
    assert Agent.model_validate({"toolCallFormat": name}).tool_call_format == name
    assert f"{name}|" in TOOL_CALL_FORMAT
    assert (BUILT_IN[name].name, resolve(name)) == (name, BUILT_IN[name])


@pytest.mark.parametrize("name", CALLS)
def test_a_template_is_known_by_the_call_that_it_writes(name: str, chat_model: Any) -> None:
    assert _detected(SKELETON.replace("@", CALLS[name]), chat_model.vocabulary) == name


def test_a_template_that_writes_no_call_is_known_by_what_it_asks_for(chat_model: Any) -> None:
    assert _detected(OWN_TEMPLATE, chat_model.vocabulary) == "hermes"
    assert _detected(SKELETON.replace("@", ""), chat_model.vocabulary) is None


def test_calls_in_an_unknown_format_are_not_taken_for_the_one_hinted_at(chat_model: Any) -> None:
    glm = "<tool_call>{{ c.name }}\n<arg_key>word</arg_key>{{ c.arguments.word }}</tool_call>"
    assert _detected(SKELETON.replace("@", glm), chat_model.vocabulary) is None


@pytest.mark.parametrize(
    "path", sorted(SHARED_TEMPLATES.glob("*.jinja")) or [None], ids=lambda path: path and path.stem
)
def test_published_templates_have_their_format(path: Any, qwen: Vocabulary) -> None:
    if path is None:
        pytest.skip("the published templates are not beside the checkout")
    expected = EXPECTED.get(path.stem, EXPECTED.get(path.stem.removesuffix("_training"), "unknown"))
    assert _detected(path.read_text(encoding="utf-8"), qwen) == expected


def _detected(source: str, vocabulary: Vocabulary) -> str | None:
    found = detect(ChatTemplate(source, {}, started=datetime(2026, 1, 2).astimezone()), source, vocabulary)
    return None if found is None else found.name


async def test_an_unknown_format_is_refused_where_tools_are_offered(make_stage: Any, write_model: Any) -> None:
    folder = write_model(template=OWN_TEMPLATE.replace("<tool_call>", "<do>"))
    with pytest.raises(UserInputError) as refused:
        await make_stage(folder=folder, offers_tools=True)
    assert "agent.toolCallFormat" in str(refused.value)
    assert "hermes" in str(refused.value)
    stage = await make_stage(folder=folder, offers_tools=True, tool_call_format="hermes")
    stage.says('<tool_call>{"name": "search", "arguments": {"word": "a"}}</tool_call>', "A small falcon.")
    assert [call.outcome for call in (await stage.episode()).tool_calls] == [CallOutcome.OK]
    await make_stage(folder=folder, offers_tools=True, agent="single_turn")


XML = "<tool_call>\n<function=search>\n<parameter=word>\na\n</parameter>\n</function>\n</tool_call>"


async def test_the_manifest_overrides_the_template(make_stage: Any) -> None:
    stage = await make_stage(tool_call_format="qwen_xml")
    stage.says(XML, "<tool_call>{}</tool_call>", "A small falcon.")
    read, malformed = (await stage.episode()).tool_calls
    assert (read.outcome, read.text) == (CallOutcome.OK, "found a")
    assert malformed.outcome is CallOutcome.INVALID_JSON
    assert "<parameter=<name>>" in malformed.text


OWN_FORMAT = """
from kestrl.formats import ToolCallFormat, Turn, WrittenCall

class Shout(ToolCallFormat):
    name = "shout"
    markers = ()
    example = "write CALL <tool> <word>"

    def read(self, pieces, schemas, *, cut):
        text = "".join(pieces)
        if text.startswith("BUG"):
            raise RuntimeError("oops")
        if not text.startswith("CALL "):
            return Turn(content=text)
        _, name, word = text.split(" ", 2)
        return Turn(content="", calls=[WrittenCall(raw=text, name=name, arguments={"word": word})])

    def write(self, calls):
        raise ValueError("for this test it need not")
"""


async def test_a_format_of_ones_own(make_stage: Any, make_file: MakeFile) -> None:
    path = make_file("shouting", OWN_FORMAT) + ":Shout"
    stage = await make_stage(tool_call_format=path)
    stage.says("CALL search falcons", "Done.")
    episode = await stage.episode()
    assert [(call.name, call.text) for call in episode.tool_calls] == [("search", "found falcons")]
    stage.says("BUG")
    failure = (await stage.episode()).failure
    assert failure is not None
    assert (failure.boundary, failure.code) == ("user_code", "format_raised")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latin", "neither built in"),
        ("nosuch:F", "cannot import"),
        ("collections:OrderedDict", "not a ToolCallFormat"),
        ("pathlib:PurePath.parts", "not a ToolCallFormat"),
        ("kestrl.formats:WrittenCall", "without arguments"),
    ],
)
def test_an_invalid_format_is_refused(name: str, expected: str) -> None:
    with pytest.raises(UserInputError, match=expected):
        resolve(name)


class Careless(type(BUILT_IN["hermes"])):  # type: ignore[misc]
    """Breaks one promise of a format."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def read(self, pieces: Sequence[str], schemas: Mapping[str, Any], *, cut: bool) -> Turn:
        turn = super().read(pieces, schemas, cut=cut)
        match self.fault:
            case "forgets an argument" if turn.calls:
                return Turn(content="", calls=[WrittenCall(raw="", name="search", arguments={})])
            case "calls what was said":
                return Turn(content="", calls=turn.calls or [WrittenCall(raw="", name="search", arguments={})])
            case "raises at damage" if any(call.problem for call in turn.calls):
                raise KeyError("name")
            case "says nothing of damage":
                return Turn(
                    content=turn.content,
                    calls=[WrittenCall(raw=call.raw) if call.problem else call for call in turn.calls],
                )
            case _:
                return turn


@pytest.mark.parametrize(
    "fault", ["forgets an argument", "calls what was said", "raises at damage", "says nothing of damage"]
)
def test_the_conformance_suite_finds_what_a_format_does_wrong(fault: str) -> None:
    with pytest.raises(AssertionError):
        check_format(Careless(fault))


def reading(name: str, text: str, *, cut: bool = False) -> Turn:
    return BUILT_IN[name].read(pieces_of(BUILT_IN[name], text), SCHEMAS, cut=cut)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen_xml", "<tool_call>{}</tool_call>", "<function=...>"),
        ("qwen_xml", "<tool_call><function=search>hm</function></tool_call>", "not <parameter"),
        (
            "qwen_xml",
            "<tool_call><function=search><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "twice",
        ),
        ("llama3_json", '{"name": "search", "parameters": {', "Expecting"),
        ("llama3_json", '{"name": "search", "parameters": 5}', '"parameters" is not a JSON object'),
        ("llama3_json", "<|python_tag|>search(1)", "not a JSON object"),
        ("mistral", "[TOOL_CALLS]", "Expecting value"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("mistral", "[TOOL_CALLS]search[ARGS]{", "Expecting"),
        ("mistral", "[TOOL_CALLS][ARGS]{}", "no name"),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>{'a'}<|call|>", "Expecting"),
        ("pythonic", "[search(word=)]", "not a list of calls"),
        ("pythonic", "[search('a')]", "by name"),
        ("pythonic", "[search(word=open('/etc/passwd').read())]", "not literals"),
        ("pythonic", "[search(word=1e999)]", "not literals"),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>", "empty"),
        ("pythonic", "[search(word='a'), 5]", "not a call"),
    ],
)
def test_a_call_that_cannot_be_parsed_has_a_reason(name: str, text: str, expected: str) -> None:
    call = reading(name, text).calls[-1]
    assert expected in call.problem
    assert call.arguments is None


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen_xml", f"Let me see.\n{XML}", "Let me see.", [("search", {"word": "a"})]),
        ("llama3_json", '<|python_tag|>{"name": "search", "arguments": {}}', "", [("search", {})]),
        ("llama3_json", 'Well: {"name": "search", "parameters": {}}', "Well:", [("search", {})]),
        ("llama3_json", '{"name": "Bo", "age": 4}', '{"name": "Bo", "age": 4}', []),
        ("mistral", 'Hm.[TOOL_CALLS]search[CALL_ID]a1[ARGS]{"word": "a"}', "Hm.", [("search", {"word": "a"})]),
        ("mistral", '[TOOL_CALLS]search{"word": "a"}', "", [("search", {"word": "a"})]),
        ("mistral", '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}', "", [("a", {}), ("b", {})]),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.search<|channel|>commentary "
            '<|constrain|>json<|message|>{"word": "a"}',
            "",
            [("search", {"word": "a"})],
        ),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4", "4", []),
        ("harmony", "<|channel|>commentary to=python<|message|>{}<|call|>", "", [("python", {})]),
        ("pythonic", "[search(word='a', exact=true, note=None, limit=-2)]", "",
         [("search", {"word": "a", "exact": True, "note": None, "limit": -2})]),
        ("pythonic", "Hm.<|tool_call_start|>[mail.send(to='a')]<|tool_call_end|>", "Hm.", [("mail.send", {"to": "a"})]),
        ("pythonic", "The list is [search(word='a')].", "The list is [search(word='a')].", []),
    ],
)  # fmt: skip
def test_variants_of_a_format(name: str, text: str, content: str, calls: list[Any]) -> None:
    turn = reading(name, text)
    assert (turn.content, [(call.name, call.arguments) for call in turn.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/Count"}, "7", 7),
        ({}, "7", "7"),
    ],
)
def test_values_of_xml_are_what_the_schema_says(schema: dict[str, Any], text: str, value: Any) -> None:
    tools = {"f": {"properties": {"x": schema}, "$defs": {"Count": {"type": "integer"}}}}
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    qwen = BUILT_IN["qwen_xml"]
    (call,) = qwen.read(pieces_of(qwen, written), tools, cut=False).calls
    assert call.arguments == {"x": value}
    assert type(call.arguments["x"]) is type(value)


def test_markers_that_are_tokens_are_found_by_their_tokens_only(load: Callable[..., Any]) -> None:
    chat_model = load()
    reader = TurnReader(chat_model.vocabulary, BUILT_IN["qwen_xml"])
    assert len(reader.parse(chat_model.vocabulary.whole(XML), SCHEMAS).calls) == 1
    (call,) = reader.parse(list(chat_model.vocabulary.content(XML)), SCHEMAS).calls
    assert (call.arguments, call.problem) == (None, CallOutcome.INVALID_JSON)  # an error for the model, never executed


def test_a_harmless_subclass_keeps_the_protocols_defaults() -> None:
    class Mine(ToolCallFormat):
        name, markers, example = "mine", (), "write nothing"

        def read(self, pieces: Sequence[str], schemas: Mapping[str, Any], *, cut: bool) -> Turn:
            return Turn(content="".join(pieces))

        def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
            raise ValueError

    mine = Mine()
    assert (mine.reasoning, mine.hints, mine.inner_ends) == (("<think>", "</think>"), (), ())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "<think>\na\n</think>\n\nb", None),
        ("mistral", "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}", "<think>a</think>b[TOOL_CALLS]f[ARGS]{}"),
        ("harmony", "<|channel|>final<|message|>4", "4"),
        ("harmony", "no channel at all", "no channel at all"),
        ("harmony", "<|channel|>analysis<|message|>cut", "<think>\ncut\n</think>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{a", "<tool_call>\n{a\n</tool_call>"),
        ("harmony", "<|channel|>commentary to=functions.f", "<tool_call>\n\n</tool_call>"),
        ("harmony", "<|channel|>final", ""),
    ],
)
def test_a_turn_for_people_and_rewards(name: str, text: str, expected: str | None) -> None:
    assert BUILT_IN[name].readable(pieces_of(BUILT_IN[name], text)) == expected
