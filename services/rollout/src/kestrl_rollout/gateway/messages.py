"""The face of Anthropic's Messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kestrl.formats.objects import read_json
from kestrl_rollout.gateway.chat_types import (
    MAX_MESSAGES,
    ChatReply,
    ChatRequest,
    function_tool,
    new_id,
    text_of,
)
from kestrl_rollout.gateway.fields import (
    FieldRules,
    Refused,
    invalid,
    limit,
    mapping,
    not_obeyed,
    objects,
    stop_strings,
    string,
)
from kestrl_rollout.history.canonical import ChatHistory

RULES = FieldRules(
    read=frozenset(
        {
            *("messages", "model", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences"),
            "thinking",
        }
    ),
    harmless=frozenset({"metadata", "service_tier", "betas", "anthropic_version", "cache_control", "inference_geo"}),
    recorded=frozenset({"context_management", "output_config", "output_format", "effort", "speed"}),
    defaults={"mcp_servers": ([],), "container": (), "n": (1,)},
    remedies={"mcp_servers": "give tools that the client runs", "container": "give tools that the client runs"},
)
THINKING = frozenset({"thinking", "redacted_thinking"})


def read(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> ChatRequest:
    """Reads a request.

    Args:
        fields: Its fields.
        sampling: The job's parameters by name.

    Raises:
        Refused: The client has to change it.
    """
    metrics = RULES.check(fields, sampling)
    tools, unsupported = _tools(fields.get("tools"))
    choice = mapping(fields.get("tool_choice"), "tool_choice")
    if choice.get("type") == "none":
        tools = []
    elif choice.get("type", "auto") != "auto":
        metrics.append(not_obeyed("tool_choice"))
    if choice.get("disable_parallel_tool_use") is True and tools:
        metrics.append(not_obeyed("parallel_tool_calls"))
    thinking = mapping(fields.get("thinking"), "thinking").get("type", "disabled") != "disabled"
    entries = objects(fields.get("messages"), "messages")
    if len(entries) > MAX_MESSAGES:
        raise invalid("messages", f"a list of at most {MAX_MESSAGES} messages")
    system = text_of(fields.get("system"), "system")
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(entries):
        messages += _messages(message, f"messages[{index}]")
    return ChatRequest(
        history=ChatHistory(messages=messages, tools=tools),
        model=string(fields.get("model"), "model"),
        max_tokens=limit(fields, "max_tokens"),
        stops=stop_strings(fields.get("stop_sequences"), "stop_sequences"),
        stream=fields.get("stream") is True,
        options={"thinking": thinking},
        metrics=[
            *metrics,
            *([not_obeyed("thinking")] if thinking else []),
            *([not_obeyed("tools")] if unsupported else []),
        ],
    )


def _tools(value: Any) -> tuple[list[Mapping[str, Any]], int]:
    """The tools that the client runs, and how many are a provider's."""
    tools: list[Mapping[str, Any]] = []
    unsupported = 0
    for index, tool in enumerate(objects(value, "tools")):
        if tool.get("type", "custom") in ("custom", None):
            tools.append(function_tool(tool, f"tools[{index}]", parameters="input_schema"))
        else:
            unsupported += 1
    return tools, unsupported


def _messages(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A message in the internal form: results of tools are messages of their own."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{name}.role", "user or assistant")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content or ""}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, block in enumerate(objects(content, f"{name}.content")):
        field, kind = f"{name}.content[{index}]", block.get("type")
        match kind:
            case "text":
                texts.append(string(block.get("text"), f"{field}.text"))
            case "tool_use" if role == "assistant":
                calls.append(_call(block, field))
            case "tool_result" if role == "user":
                text = text_of(block.get("content"), f"{field}.content")
                call_id = string(block.get("tool_use_id"), f"{field}.tool_use_id")
                failed = {"is_error": True} if block.get("is_error") is True else {}
                results.append({"role": "tool", "content": text, "tool_call_id": call_id, **failed})
            case "thinking" | "redacted_thinking" if role == "assistant":
                thoughts.append(string(block.get("thinking"), f"{field}.thinking"))
            case _:
                raise Refused(
                    f"{field} is of type {kind!r}: only text, calls of tools and their results can be rendered; leave "
                    "it out",
                    code="unsupported_content",
                    field=field,
                )
    text = "".join(texts)
    if role == "assistant":
        return [{"role": role, "content": text, "tool_calls": calls, "reasoning": "".join(thoughts)}]
    return [*results, *([{"role": role, "content": text}] if texts or not results else [])]


def _call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    name: Any = block.get("name")
    if not isinstance(name, str):
        raise invalid(f"{field}.name", "a name")
    arguments = dict(mapping(block.get("input"), f"{field}.input"))
    return {
        "id": string(block.get("id"), f"{field}.id"),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def write(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    """The answer."""
    content: list[dict[str, Any]] = []
    if reply.reasoning and request.options["thinking"]:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.calls:
        content.append({"type": "text", "text": reply.content})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": read_json(call.arguments)}
        for call in reply.calls
    ]
    reason = "stop_sequence" if reply.stop else "end_turn"
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": request.model or "policy",
        "content": content,
        "stop_reason": "max_tokens" if reply.cut else "tool_use" if reply.calls else reason,
        "stop_sequence": reply.stop or None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "output_tokens": reply.sampled_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
        },
    }


def events(answer: Mapping[str, Any], request: ChatRequest) -> Iterator[str]:
    """An answer as server-sent events."""
    del request
    usage = answer["usage"]
    opening_message: dict[str, Any] = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield _event("message_start", message=opening_message)
    for index, block in enumerate(answer["content"]):
        opening, deltas = _block(block)
        yield _event("content_block_start", index=index, content_block=opening)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    reasons = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=reasons, usage=usage)
    yield _event("message_stop")


def _block(block: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """A block as it begins, and its deltas."""
    match block["type"]:
        case "tool_use":
            text = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": block["signature"]}]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error(status: int, message: str, code: str, field: str) -> dict[str, Any]:
    """An error. The API has no place for code and field but beside the message."""
    kind = "api_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code, "param": field or None}}


def error_event(answer: Mapping[str, Any]) -> str:
    """An error after the beginning of a stream."""
    return f"event: error\ndata: {json.dumps(answer)}\n\n"
