"""Where text and values of strangers enter: each boundary takes every hostile value, or refuses it with its type.

Whatever is taken can be sent: it has a protobuf form, and a JSON form that the next process can read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.hostile_values import DOCUMENTS, NUMBERS, TEXTS, VALUES, nested

from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.api.judge.v1 import judge_pb2
from kestrl.data.conversations import read_conversations
from kestrl.data.rows import read_rows
from kestrl.episode.codec import failure_to_proto
from kestrl.errors import (
    JudgeFailure,
    KestrlError,
    ToolFailure,
    UserCodeError,
    UserInputError,
    described,
)
from kestrl.rewards import Score
from kestrl.rewards.checking import as_score
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.arguments import Arguments, ArgumentsInvalid
from kestrl_judge.correctness import VerdictForm
from kestrl_judge.ruler.reply import Malformed, parse
from kestrl_rollout.groups.loop_metrics import LoopMetrics, returned_reward
from kestrl_tools.execution import answer_of, for_model, state_of
from kestrl_tools.http.client import Response
from kestrl_tools.http.results import result_of


def sent(text: str) -> str:
    """A text that a message holds; raises if it has no such form."""
    return pb.Failure(message=text).SerializeToString().decode("utf-8", "ignore")


def check_failure(error: KestrlError) -> None:
    """Its failure is sent as metadata, whose size gRPC bounds at 8 KiB."""
    assert len(failure_to_proto(error.failure(component="c")).SerializeToString()) < 8_000


def check_message(error: Exception, longest: int) -> None:
    assert len(sent(str(error))) < longest


def is_json(text: str) -> None:
    """Raises unless the text is JSON that is far from every limit of a reader."""
    json.loads(sent(text) and text, parse_constant=pytest.fail)
    assert text.count("[") - text.count("\\[") < 1_000_000
    depth = deepest = 0
    for character in text if len(text) < 100_000 else "":
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    assert deepest <= 100


# --- what user code returns


def tool_result(value: Any) -> None:
    sent(answer_of("t", value).text)


def tool_data(value: Any) -> None:
    answer = answer_of("t", ToolResult(text="", data={"value": value}))
    is_json(answer.data_json)


def tool_facts(value: Any) -> None:
    answer = answer_of("t", ToolResult(text="", data=value))
    assert isinstance(json.loads(answer.data_json), dict)
    is_json(answer.data_json)


def environment_state(value: Any) -> None:
    is_json(json.dumps(state_of("e", value), ensure_ascii=False))


def reward(value: Any) -> None:
    score = as_score("r", value)
    judge_pb2.EpisodeScore(reward=score.value, metrics=score.metrics).SerializeToString()


def reward_metric(value: Any) -> None:
    reward(Score(value=1.0, metrics={"m": value}))


def reward_metrics(value: Any) -> None:
    reward(Score(value=1.0, metrics=value))


def reward_turns(value: Any) -> None:
    as_score("r", [value], turns=1)


def reward_answer(value: Any) -> None:
    answer = as_score("r", Score(value=1.0, answer=value)).answer
    judge_pb2.EpisodeScore(answer=answer).SerializeToString()
    assert len(answer or "") <= 10_000


def loop_reward(value: Any) -> None:
    returned_reward("l", value)


def loop_metric(value: Any) -> None:
    usable = LoopMetrics().usable("l", {"m": value})
    assert ("m" in usable) != ("metrics_left_out" in usable)


ENTRANCES: Mapping[Callable[[Any], None], tuple[type[KestrlError], ...]] = {
    tool_result: (ToolFailure,),
    tool_data: (ToolFailure,),
    tool_facts: (ToolFailure,),
    environment_state: (ToolFailure,),
    reward: (JudgeFailure,),
    reward_metric: (),
    reward_metrics: (JudgeFailure,),
    reward_turns: (JudgeFailure,),
    reward_answer: (JudgeFailure,),
    loop_reward: (UserCodeError,),
    loop_metric: (),
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("entrance", ENTRANCES, ids=lambda entrance: entrance.__name__)
def test_a_value_of_user_code_is_taken_or_refused_with_its_type(entrance: Callable[[Any], None], value: str):
    try:
        entrance(VALUES[value])
    except ENTRANCES[entrance] as error:
        check_failure(error)


@pytest.mark.parametrize("text", TEXTS)
def test_a_name_of_a_metric_is_taken_or_left_out(text: str):
    for entrance in (reward_metrics, loop_metrics):
        entrance({TEXTS[text]: 1.0})


def loop_metrics(value: Any) -> None:
    judge_pb2.EpisodeScore(metrics=LoopMetrics().usable("l", value)).SerializeToString()


def test_metrics_are_bounded_in_number_and_length():
    many = {f"m{number}": 1.0 for number in range(10_000)}
    for metrics in (many, {"m\ud800": 1.0}, {"m" * 1_000: 1.0}, {"reward": 1.0}):
        for usable in (as_score("r", Score(metrics=metrics)).metrics, LoopMetrics().usable("l", metrics)):
            assert len(usable) <= 1_001
            assert usable["metrics_left_out"] == max(1, len(metrics) - 1_000)


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_error_is_bounded_text(text: str):
    for kind in (KestrlError, ToolFailure, JudgeFailure, UserInputError):
        check_failure(kind(TEXTS[text]))
    assert len(sent(described(ValueError(TEXTS[text])))) < 3_000
    assert for_model("t", ToolError(TEXTS[text])).text
    sent(for_model("t", ToolError(TEXTS[text])).text)


# --- what comes over a network


def scores_reply(document: str) -> None:
    parse(document, ["a"])
    parse(f'{{"scores": {document}}}', ["a"])
    parse(f'{{"scores": [{document}]}}', ["a"])


def scores_fields(document: str) -> None:
    for name in ("trajectory_id", "explanation", "score"):
        fields = {"trajectory_id": '"a"', "explanation": '"e"', "score": "0.5"} | {name: document}
        entry = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        try:
            grades = parse(f'{{"scores": [{{{entry}}}]}}', ["a"])
        except Malformed as error:
            check_message(error, 1_000)
        else:
            sent(grades["a"].explanation)


def verdict(document: str) -> None:
    for name in ("answer_id", "explanation", "correct"):
        fields = {"answer_id": '"a"', "explanation": '"e"', "correct": "true"} | {name: document}
        entry = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        try:
            sent(VerdictForm("a").parse(f"{{{entry}}}")["a"].explanation)
        except Malformed as error:
            check_message(error, 1_000)
    VerdictForm("a").parse(document)


def call_arguments(document: str) -> None:
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        value = document
    schema = {"type": "object", "properties": {"x": {}, "y": {"type": "string"}}, "additionalProperties": False}
    for arguments in (value, {"x": value}, {"y": value}):
        try:
            is_json(json.dumps(Arguments(schema).parse(arguments), ensure_ascii=False))
        except ArgumentsInvalid as error:
            check_message(error, 3_000)


def http_response(document: str) -> None:
    for body in (document, f'{{"a": {document}}}'):
        data = body.encode("utf-8", "replace")
        response = Response(
            status=200, reason="OK", kind="application/json", charset="utf-8", body=data, truncated=False
        )
        is_json(answer_of("t", result_of("t", response)).data_json)


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize(
    ("entrance", "refusals"),
    [
        (scores_reply, (Malformed,)),
        (scores_fields, ()),
        (verdict, (Malformed,)),
        (call_arguments, ()),
        (http_response, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_document_of_a_stranger_is_taken_or_refused_with_its_type(
    entrance: Callable[[str], None], refusals: tuple[type[Exception], ...], document: str
):
    try:
        entrance(DOCUMENTS[document])
    except refusals as error:
        check_message(error, 1_000)


# --- files


def check_place(error: UserInputError, file: Path) -> None:
    assert str(file) in str(error)
    check_failure(error)


def row_of(document: str) -> list[str]:
    return [
        document,
        f'{{"messages": [{{"role": "user", "content": {document}}}]}}',
        f'{{"prompt": [{{"role": "user", "content": "a"}}], "extra_info": {document}, "data_source": "d"}}',
        f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": {document}}}]}}',
        f'{{"messages": {document}, "tools": {document}}}',
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("read", [read_rows, read_conversations])
def test_a_row_of_a_file_is_taken_or_refused_with_its_place(tmp_path: Path, read: Callable[[Path], Any], document: str):
    file = tmp_path / "rows.jsonl"
    for line in row_of(DOCUMENTS[document]):
        file.write_text(line + "\n")
        try:
            read(file)
        except UserInputError as error:
            check_place(error, file)


def test_the_corpus_holds_what_it_says():
    with pytest.raises(RecursionError):
        json.dumps(nested(5_000))
    assert set(NUMBERS) <= set(VALUES)
    assert set(TEXTS) <= set(VALUES)
