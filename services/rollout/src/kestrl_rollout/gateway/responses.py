"""The face of OpenAI's Responses. Pure: what earlier responses said comes with a request's fields."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kestrl_rollout.gateway.chat_types import (
    MAX_MESSAGES,
    NOT_FUNCTIONS,
    ChatReply,
    ChatRequest,
    function_tool,
    new_id,
    text_of,
)
from kestrl_rollout.gateway.fields import FieldRules, Refused, invalid, limit, mapping, not_obeyed, objects, string
from kestrl_rollout.history.canonical import ChatHistory

RULES = FieldRules(
    read=frozenset(
        {
            *("input", "instructions", "model", "tools", "tool_choice", "parallel_tool_calls", "stream", "text"),
            *("max_output_tokens", "previous_response_id"),
        }
    ),
    harmless=frozenset(
        {
            *("store", "include", "metadata", "user", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
            *("safety_identifier", "client_metadata", "stream_options", "session_id"),
        }
    ),
    recorded=frozenset({"reasoning", "context_management", "verbosity"}),
    defaults={
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "conversation": (),
        "prompt": (),
        "n": (1,),
        "logit_bias": ({},),
    },
    remedies={
        "background": "wait for the answer",
        "truncation": "shorten the input",
        "conversation": "give the items as input, or previous_response_id",
        "prompt": "give the items as input",
        "max_tool_calls": "set agent.maxTurns of the job",
    },
)


def read(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> ChatRequest:
    """Reads a request.

    Args:
        fields: Its fields.
        sampling: The job's parameters by name.

    Raises:
        Refused: The client has to change it.
    """
    metrics = RULES.check(fields, sampling)
    tools, in_namespaces, unsupported = _tools(fields.get("tools"))
    choice = fields.get("tool_choice")
    if choice == "none":
        tools = []
    elif choice not in (None, "auto"):
        metrics.append(not_obeyed("tool_choice"))
    if fields.get("parallel_tool_calls") is False and tools:
        metrics.append(not_obeyed("parallel_tool_calls"))
    text = mapping(fields.get("text"), "text")
    if mapping(text.get("format"), "text.format").get("type", "text") != "text":
        metrics.append(not_obeyed("response_format"))
    instructions = string(fields.get("instructions"), "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest(
        history=ChatHistory(messages=[*system, *_messages(fields.get("input"))], tools=tools),
        instructions=system,
        previous=string(fields.get("previous_response_id"), "previous_response_id"),
        model=string(fields.get("model"), "model"),
        max_tokens=limit(fields, "max_output_tokens"),
        stream=fields.get("stream") is True,
        options={
            "tools": fields.get("tools") or [],
            "choice": choice or "auto",
            "instructions": instructions or None,
            "in_namespaces": in_namespaces,
        },
        metrics=[*metrics, *([not_obeyed("tools")] if unsupported else [])],
    )


def _tools(value: Any) -> tuple[list[Mapping[str, Any]], dict[str, Mapping[str, str]], int]:
    """The tools that are functions, namespace and name of those in namespaces by the name that the model is shown, and
    how many are no functions.
    """
    tools: list[Mapping[str, Any]] = []
    in_namespaces: dict[str, Mapping[str, str]] = {}
    unsupported = 0
    for index, tool in enumerate(objects(value, "tools")):
        name = f"tools[{index}]"
        if tool.get("type") != "namespace":
            unsupported += not _add_function(tools, tool, name)
            continue
        namespace = string(tool.get("name"), f"{name}.name")
        for place, inner in enumerate(objects(tool.get("tools"), f"{name}.tools")):
            if not _add_function(tools, inner, f"{name}.tools[{place}]"):
                unsupported += 1
                continue
            function: dict[str, Any] = tools[-1]["function"]
            shown_name = _in_namespace(namespace, function["name"])
            in_namespaces[shown_name] = {"name": function["name"], "namespace": namespace}
            function["name"] = shown_name
    names = Counter(tool["function"]["name"] for tool in tools)
    twice = next((shown_name for shown_name in in_namespaces if names[shown_name] > 1), None)
    if twice is not None:
        raise Refused(f"two tools are {twice!r}, one of them by its namespace; rename one", field="tools")
    return tools, in_namespaces, unsupported


def _in_namespace(namespace: str, name: str) -> str:
    """The name that the model is shown for a function in a namespace, as other clients name those of MCP servers."""
    return f"{namespace}__{name}" if namespace else name


def _add_function(tools: list[Mapping[str, Any]], tool: Mapping[str, Any], name: str) -> bool:
    """Adds a tool if it is a function; returns whether it is."""
    kind = tool.get("type", "function")
    if kind == "function":
        tools.append(function_tool(tool, name))
    elif kind not in NOT_FUNCTIONS:
        raise Refused(f"{name} is of type {kind!r}; give a function", field=f"{name}.type")
    return kind == "function"


def _messages(value: Any) -> list[dict[str, Any]]:
    """The items of an input as messages. Reasoning, text and calls that follow each other are one turn."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    items = objects(value, "input")
    if len(items) > MAX_MESSAGES:
        raise invalid("input", f"a list of at most {MAX_MESSAGES} items")
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """The turn that is being read."""
    for index, item in enumerate(items):
        name, kind = f"input[{index}]", item.get("type", "message")
        role = item.get("role")
        if kind == "message" and role != "assistant":
            turn = None
            if role not in ("user", "system", "developer"):
                raise invalid(f"{name}.role", "user, system, developer or assistant")
            text = text_of(item.get("content"), f"{name}.content", kinds=("input_text", "text", "output_text"))
            messages.append({"role": "system" if role == "developer" else role, "content": text})
        elif kind == "function_call_output":
            turn = None
            text = text_of(item.get("output"), f"{name}.output", kinds=("input_text", "text", "output_text"))
            call_id = string(item.get("call_id"), f"{name}.call_id")
            messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
        elif kind in ("message", "reasoning", "function_call"):
            has_text = turn is not None and (turn["said"] or turn["tool_calls"])
            if turn is None or (kind != "function_call" and has_text):
                turn = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": [], "said": False}
                messages.append(turn)
            _add(turn, item, kind, name)
        else:
            raise Refused(
                f"{name} is of type {kind!r}: messages, reasoning, calls of functions and their results can be "
                "rendered; leave it out",
                code="unsupported_content",
                field=name,
            )
    return messages


def _add(turn: dict[str, Any], item: Mapping[str, Any], kind: str, name: str) -> None:
    """Adds an item to the turn that it is part of."""
    if kind == "reasoning":
        parts = objects(item.get("content"), f"{name}.content")
        turn["reasoning"] += "".join(string(part.get("text"), f"{name}.content") for part in parts)
    elif kind == "message":
        kinds = ("output_text", "text", "refusal", "input_text")
        turn["content"], turn["said"] = text_of(item.get("content"), f"{name}.content", kinds=kinds), True
    else:
        if not isinstance(item.get("name"), str):
            raise invalid(f"{name}.name", "a name")
        arguments = string(item.get("arguments"), f"{name}.arguments")
        shown_name = _in_namespace(string(item.get("namespace"), f"{name}.namespace"), item["name"])
        turn["tool_calls"].append(
            {
                "id": string(item.get("call_id"), f"{name}.call_id"),
                "type": "function",
                "function": {"name": shown_name, "arguments": arguments or "{}"},
            }
        )


def write(reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
    """The answer."""
    status = "incomplete" if reply.cut else "completed"
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        output.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [thought]})
    if reply.content or not reply.calls:
        part: dict[str, Any] = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status, "content": [part]}
        )
    for call in reply.calls:
        entry = {"type": "function_call", "id": new_id("fc_"), "call_id": call.id, "status": "completed"}
        namespaced = request.options["in_namespaces"].get(call.name, {"name": call.name})
        output.append({**entry, **namespaced, "arguments": call.arguments})
    sampled = reply.sampled_tokens
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "instructions": request.options["instructions"],
        "metadata": {},
        "model": request.model or "policy",
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "temperature": None,
        "top_p": None,
        "tool_choice": request.options["choice"],
        "tools": request.options["tools"],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def events(answer: Mapping[str, Any], request: ChatRequest) -> Iterator[str]:
    """An answer as server-sent events."""
    del request
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number - 1, **fields})}\n\n"

    opening_response: dict[str, Any] = {
        **answer,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("response.created", response=opening_response)
    yield event("response.in_progress", response=opening_response)
    for index, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            opening: dict[str, Any] = {**item, "status": "in_progress", "arguments": ""}
        else:
            opening = {**item, "content": []}
        if item["type"] == "message":
            opening["status"] = "in_progress"
        yield event("response.output_item.added", output_index=index, item=opening)
        if item["type"] == "function_call":
            text = item["arguments"]
            yield event("response.function_call_arguments.delta", **place, delta=text)
            yield event("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        elif item["type"] == "message":
            (part,) = item["content"]
            inside = {**place, "content_index": 0}
            yield event("response.content_part.added", **inside, part={**part, "text": ""})
            yield event("response.output_text.delta", **inside, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **inside, part=part)
        else:
            (part,) = item["content"]
            inside = {**place, "content_index": 0}
            yield event("response.reasoning_text.delta", **inside, delta=part["text"])
            yield event("response.reasoning_text.done", **inside, text=part["text"])
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if answer["status"] == "incomplete" else "response.completed", response=answer)


def error_event(answer: Mapping[str, Any]) -> str:
    """An error after the beginning of a stream."""
    failure = answer["error"]
    fields = {"type": "error", "code": failure["code"], "message": failure["message"], "param": failure["param"]}
    return f"event: error\ndata: {json.dumps({**fields, 'sequence_number': 0})}\n\n"
