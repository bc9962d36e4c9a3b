"""Where answers of servers, engines and sandboxes, and documents of strangers, enter; as `test_boundaries`.

What is refused is refused with the error that its caller expects; what is taken can be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import mcp_types
import pytest
from pydantic import ValidationError
from tests.fakes.hostile_values import DOCUMENTS, TEXTS
from tests.unit.shared.test_boundaries import check_failure, is_json, sent

from kestrl.engines.vllm import Vllm
from kestrl.errors import EngineFailure, KestrlError, ToolFailure, UserInputError
from kestrl.tools import ToolError
from kestrl_inference.engine import _read as read_answer  # pyright: ignore[reportPrivateUsage] - its boundary
from kestrl_rollout.engine.client import EngineClient
from kestrl_rollout.engine.client import _completion as read_completion  # pyright: ignore[reportPrivateUsage]
from kestrl_rollout.engine.http import HttpAnswer
from kestrl_sandbox.contract import Outcome, Result
from kestrl_sandbox.remote.wire import ResultMessage, SlotAnswer, request_of
from kestrl_tools.execution import answer_of
from kestrl_tools.http.document import DocumentInvalid, Unsupported, parsed
from kestrl_tools.http.operations import of_document
from kestrl_tools.mcp.results import result_of
from kestrl_tools.servers import ListedTool, definitions

GENERATED = (
    "{0}",
    '{{"model": {0}, "choices": []}}',
    '{{"model": "p", "choices": [{0}]}}',
    '{{"model": "p", "choices": [{{"token_ids": {0}, "finish_reason": "stop", "logprobs": {{"content": []}}}}]}}',
    '{{"model": "p", "choices": [{{"token_ids": [1], "finish_reason": {0}, "logprobs": {{"content": [{0}]}}}}]}}',
    '{{"model": "p", "choices": [{{"token_ids": [1], "finish_reason": "stop", "logprobs": {{"content": '
    '[{{"logprob": {0}, "token_id": 1}}]}}}}]}}',
    '{{"model": "p", "choices": [{{"token_ids": [1], "finish_reason": "stop", "logprobs": {{"content": '
    '[{{"logprob": -1, "token": {0}}}]}}}}]}}',
)
SCORED = (
    "{0}",
    '{{"prompt_logprobs": {0}}}',
    '{{"prompt_logprobs": [null, {0}]}}',
    '{{"prompt_logprobs": [null, {{"2": {0}}}]}}',
)
LISTED = ("{0}", '{{"data": {0}}}', '{{"data": [{0}]}}', '{{"data": [{{"id": {0}, "root": {0}}}]}}')
CALLED = (
    "{0}",
    '{{"content": {0}}}',
    '{{"content": [{{"type": "text", "text": {0}}}]}}',
    '{{"content": [{{"type": "resource_link", "uri": {0}, "name": {0}}}]}}',
    '{{"content": [], "structuredContent": {0}}}',
    '{{"content": [], "structuredContent": {{"a": {0}}}}}',
    '{{"content": [], "isError": {0}}}',
)
SCHEMAS = (
    "{0}",
    '{{"type": {0}}}',
    '{{"properties": {0}}}',
    '{{"properties": {{"a": {0}}}}}',
    '{{"$defs": {0}, "$ref": {0}}}',
)
OPENAPI = (
    "{0}",
    '{{"openapi": {0}, "paths": {{}}}}',
    '{{"openapi": "3.1.0", "paths": {0}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {0}}}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {{"get": {0}}}}}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {{"get": {{"operationId": {0}, "summary": {0}}}}}}}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {{"get": {{"operationId": "a", "parameters": {0}}}}}}}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {{"get": {{"operationId": "a", "parameters": [{{"name": {0}, '
    '"in": "query", "schema": {0}}}]}}}}}}}}',
    '{{"openapi": "3.1.0", "paths": {{"/a": {{"post": {{"operationId": "a", "requestBody": {0}}}}}}}}}',
)
RUNS = (
    "{0}",
    '{{"code": {0}}}',
    '{{"code": "", "language": {0}, "seconds": {0}, "output_bytes": {0}, "files": {0}}}',
)


def generated(document: str) -> None:
    answer = HttpAnswer(200, document.encode("utf-8", "replace"))
    completion = read_completion("e", EngineClient(None, Vllm())._read("e", "p", answer))  # pyright: ignore[reportPrivateUsage]
    sent(completion.finish_reason)


def scored(document: str) -> None:
    read_answer(lambda: Vllm().read_scores(document.encode("utf-8", "replace"), [1, 2]))


def adapters(document: str) -> None:
    read_answer(lambda: Vllm().read_adapters(document.encode("utf-8", "replace"), "base"))


def mcp_call(document: str) -> None:
    result = mcp_types.CallToolResult.model_validate_json(document.encode("utf-8", "replace"))
    answer = answer_of("t", result_of("t", result))
    sent(answer.text)
    is_json(answer.data_json)


def mcp_list(document: str) -> None:
    try:
        schema = json.loads(document)
    except (ValueError, RecursionError):
        return  # is not listed
    for tool in definitions("mcp", "s", [ListedTool("t", "d", schema, "t")], None) if isinstance(schema, dict) else ():
        is_json(json.dumps(tool.schema.parameters, ensure_ascii=False))


def openapi(document: str) -> None:
    for operation in of_document("s", parsed(document.encode("utf-8", "replace")), None, ()):
        sent(operation.name)
        definitions("http", "s", [operation.listed()], None)


def sandbox_request(document: str) -> None:
    answer = request_of(document.encode("utf-8", "replace").decode())
    if isinstance(answer, SlotAnswer):
        assert len(sent(answer.model_dump_json())) < 2_000


BOUNDARIES: dict[Callable[[str], None], tuple[tuple[str, ...], tuple[type[Exception], ...]]] = {
    generated: (GENERATED, (EngineFailure,)),
    scored: (SCORED, (EngineFailure,)),
    adapters: (LISTED, (EngineFailure,)),
    mcp_call: (CALLED, (ValidationError, ToolFailure, ToolError)),
    mcp_list: (SCHEMAS, (UserInputError,)),
    openapi: (OPENAPI, (DocumentInvalid, Unsupported, UserInputError)),
    sandbox_request: (RUNS, ()),
}


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda boundary: boundary.__name__)
def test_an_answer_of_a_stranger_is_taken_or_refused_with_its_type(boundary: Callable[[str], None], document: str):
    places, refusals = BOUNDARIES[boundary]
    for place in places:
        try:
            boundary(place.format(DOCUMENTS[document]))
        except refusals as error:
            if isinstance(error, KestrlError):
                check_failure(error)


@pytest.mark.parametrize("text", TEXTS)
def test_a_description_and_a_name_of_a_server_are_bounded_text(text: str):
    (tool,) = definitions("mcp", "s", [ListedTool("t", TEXTS[text], {"type": "object"}, "t")], None)
    assert len(sent(tool.schema.description)) < 5_000 * 4


@pytest.mark.parametrize("text", TEXTS)
def test_what_code_in_a_sandbox_says_can_be_sent(text: str):
    value = TEXTS[text]
    result = Result(
        outcome=Outcome.NONZERO_EXIT,
        display=value,
        message=value,
        missing={value: value},
        error={"type": value, "text": value},
    )
    message = ResultMessage.of(result).model_dump_json()
    again = ResultMessage.model_validate_json(message).result()
    sent(again.message + str(again.display))
