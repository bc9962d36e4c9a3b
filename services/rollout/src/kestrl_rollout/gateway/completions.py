"""The face of OpenAI's Chat Completions. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kestrl_rollout.gateway.chat_types import (
    MAX_MESSAGES,
    NOT_FUNCTIONS,
    ChatReply,
    ChatRequest,
    SampledToken,
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
            *("messages", "model", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "stop"),
            *("max_completion_tokens", "logprobs", "response_format", "parallel_tool_calls"),
        }
    ),
    harmless=frozenset(
        {
            *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
            *("safety_identifier", "session_id", "cache_salt", "priority", "request_id"),
        }
    ),
    recorded=frozenset(
        {
            *("reasoning_effort", "verbosity", "reasoning", "thinking", "include_reasoning", "enable_thinking"),
            *("web_search_options", "prediction"),
        }
    ),
    defaults={
        "n": (1,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "best_of": (1,),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "echo": (False,),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
    },
    remedies={
        "top_logprobs": "the log-probability of the sampled token alone is known",
        "functions": "give tools",
        "function_call": "give tool_choice",
        "modalities": "the model has text alone",
        "chat_template_kwargs": "set agent.templateArguments of the job",
        "chat_template": "set agent.template of the job",
        "guided_json": "the learner must compute the distribution that was sampled from",
    },
)
ROLES = ("system", "developer", "user", "assistant", "tool")


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
    choice = fields.get("tool_choice")
    if choice == "none":
        tools = []
    elif choice not in (None, "auto"):
        metrics.append(not_obeyed("tool_choice"))
    if mapping(fields.get("response_format"), "response_format").get("type", "text") != "text":
        metrics.append(not_obeyed("response_format"))
    if fields.get("parallel_tool_calls") is False and tools:
        metrics.append(not_obeyed("parallel_tool_calls"))
    messages = objects(fields.get("messages"), "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"a list of at most {MAX_MESSAGES} messages")
    stream_options = mapping(fields.get("stream_options"), "stream_options")
    return ChatRequest(
        history=ChatHistory(messages=[_message(message, index) for index, message in enumerate(messages)], tools=tools),
        model=string(fields.get("model"), "model"),
        max_tokens=limit(fields, "max_completion_tokens", "max_tokens"),
        stops=stop_strings(fields.get("stop"), "stop"),
        stream=fields.get("stream") is True,
        options={
            "logprobs": fields.get("logprobs") is True,
            "usage": stream_options.get("include_usage") is True,
        },
        metrics=[*metrics, *([not_obeyed("tools")] if unsupported else [])],
    )


def _tools(value: Any) -> tuple[list[Mapping[str, Any]], int]:
    """The tools that are functions, and how many are not."""
    tools: list[Mapping[str, Any]] = []
    unsupported = 0
    for index, tool in enumerate(objects(value, "tools")):
        kind, name = tool.get("type", "function"), f"tools[{index}]"
        if kind in NOT_FUNCTIONS:
            unsupported += 1
        elif kind == "function":
            tools.append(function_tool(mapping(tool.get("function"), f"{name}.function"), f"{name}.function"))
        else:
            raise Refused(f"{name} is of type {kind!r}; give a function", field=f"{name}.type")
    return tools, unsupported


def _message(fields: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message in the internal form."""
    name, role = f"messages[{index}]", fields.get("role")
    if role not in ROLES:
        raise invalid(f"{name}.role", f"one of {', '.join(ROLES)}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    text = text_of(fields.get("content"), f"{name}.content", kinds=kinds)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if role == "tool":
        message["tool_call_id"] = string(fields.get("tool_call_id"), f"{name}.tool_call_id")
    if role == "assistant":
        if fields.get("function_call") is not None:
            raise Refused(f"{name}.function_call is not supported: give tool_calls", field=f"{name}.function_call")
        reasoning = fields.get("reasoning_content") or fields.get("reasoning")
        message["reasoning"] = reasoning if isinstance(reasoning, str) else ""
        message["tool_calls"] = [
            _call(call, f"{name}.tool_calls[{place}]")
            for place, call in enumerate(objects(fields.get("tool_calls"), f"{name}.tool_calls"))
        ]
    return message


def _call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = mapping(call.get("function"), f"{name}.function")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{name}.function.name", "a name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise invalid(f"{name}.function.arguments", "JSON as a string")
    return {
        "id": string(call.get("id"), f"{name}.id"),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments or "{}"},
    }


def write(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    """The answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if reply.calls and not reply.content else reply.content,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    sampled = reply.sampled_tokens
    logprobs = {"content": _logprobs(reply.tokens), "refusal": None} if request.options["logprobs"] else None
    finish = "length" if reply.cut else "tool_calls" if reply.calls else "stop"
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model or "policy",
        "system_fingerprint": reply.policy,
        "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": reply.prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        },
    }


def _logprobs(tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
    return [
        {"token": token.text, "bytes": list(token.text.encode()), "logprob": token.logprob, "top_logprobs": []}
        for token in tokens
    ]


def events(answer: Mapping[str, Any], request: ChatRequest) -> Iterator[str]:
    """An answer as server-sent events."""
    (choice,) = answer["choices"]
    message = dict(choice["message"])
    calls = message.pop("tool_calls", ())
    shared = {key: answer[key] for key in ("id", "created", "model", "system_fingerprint")}

    def chunk(choices: list[Any], usage: Any = None) -> str:
        usages = {"usage": usage} if request.options["usage"] else {}
        return f"data: {json.dumps({**shared, 'object': 'chat.completion.chunk', 'choices': choices, **usages})}\n\n"

    def delta(value: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        return chunk([{"index": 0, "delta": value, "logprobs": logprobs, "finish_reason": finish}])

    del message["refusal"]
    yield delta(message, logprobs=choice["logprobs"])
    for index, call in enumerate(calls):
        yield delta({"tool_calls": [{"index": index, **call}]})
    yield delta({}, finish=choice["finish_reason"])
    if request.options["usage"]:
        yield chunk([], answer["usage"])
    yield "data: [DONE]\n\n"


def error(status: int, message: str, code: str, field: str) -> dict[str, Any]:
    """An error."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return {"error": {"message": message, "type": kind, "code": code, "param": field or None}}


def error_event(answer: Mapping[str, Any]) -> str:
    """An error after the beginning of a stream."""
    return f"data: {json.dumps(answer)}\n\n"
