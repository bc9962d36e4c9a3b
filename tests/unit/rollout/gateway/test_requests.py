"""A face reads any JSON that a client sends or refuses it by name, and what it has read can be compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrl_rollout.gateway.faces import FACES
from kestrl_rollout.gateway.fields import Refused, read_object
from kestrl_rollout.history.canonical import Digests


def one_of(words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words.split())


WORDS = st.just("\ud800") | one_of(
    "user assistant system developer tool text input_text output_text function none auto custom web_search x {} "
    "message function_call function_call_output reasoning tool_use tool_result thinking json_object"
)
KEYS = one_of(
    "role content type text tool_calls function name arguments id tool_call_id input call_id output tool_use_id "
    "thinking parameters input_schema description format disable_parallel_tool_use"
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)
FIELDS = one_of(
    "messages input system instructions tools tool_choice max_tokens stop stop_sequences response_format "
    "stream_options text thinking parallel_tool_calls n logit_bias model max_output_tokens previous_response_id "
    "temperature top_k modalities truncation reasoning"
)
MESSAGES = st.lists(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5), max_size=4)


@pytest.mark.parametrize("path", FACES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(FIELDS, VALUES, max_size=4), messages=MESSAGES)
def test_any_json_is_read_or_refused(path: str, fields: dict[str, Any], messages: list[Any]) -> None:
    body = json.dumps({**fields, "messages" if path != "v1/responses" else "input": messages}).encode()
    try:
        request = FACES[path].read(read_object(body), {"temperature": 1.0})
    except Refused as refusal:
        json.dumps(FACES[path].error(400, str(refusal), refusal.code, refusal.field)).encode()
        return
    Digests.of(request.history)
    for message in request.history.messages:
        message["content"].encode()
