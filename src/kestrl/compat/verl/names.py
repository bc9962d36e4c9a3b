"""Names that agent loops and tools for verl import, with compatible behaviour.

The signatures are those of verl 0.9.1, with the names of 0.8 and of its main branch. Unsupported features, such as
images, raise an error when they are used.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from kestrl.errors import UserCodeError

LoopClass = TypeVar("LoopClass", bound="type[Any]")


class AgentLoopMetrics(BaseModel):
    """Timings and counts of a loop."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """Result of a loop."""

    model_config = ConfigDict(extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 on generated tokens, 0 on others."""
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}


class TokenOutput(BaseModel):
    """Result of `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class FunctionCall(BaseModel):
    """A parsed tool call."""

    arguments: str
    """JSON text, as the model wrote it."""
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Base class of tool parsers for verl; a registered one takes precedence over the model's format."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Additional tokens that end a turn."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Content and calls of a turn."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """The parser of a name, or that of the model's tool-call format."""
        return cls._registry.get(name, _FormatParser)(tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Registers a parser."""

        def decorator(subclass: type[ToolParser]) -> type[ToolParser]:
            cls._registry[name] = subclass
            return subclass

        return decorator


class _FormatParser(ToolParser):
    """Reads turns in the job's tool-call format. An unreadable call keeps its text, so that the loop answers it with an
    error.
    """

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        definitions = [tool.model_dump(exclude_none=True)["function"] for tool in tools or ()]
        schemas: dict[str, Mapping[str, Any]] = {
            definition["name"]: definition.get("parameters") or {} for definition in definitions
        }
        content, calls = self.tokenizer.read_turn(responses_ids, schemas)
        function_calls = [
            FunctionCall(
                name=call.name,
                arguments=call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False),
            )
            for call in calls
        ]
        return content, function_calls


def build_gpt_oss_tool_response_text(messages: list[dict[str, Any]], tool_call_names: list[str]) -> str:
    """Tool results in the harmony format, up to the next turn."""
    results = (
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{message['content']}<|end|>"
        for name, message in zip(tool_call_names, messages, strict=False)
    )
    return "".join(results) + "<|start|>assistant"


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop."""
    return asyncio.get_running_loop()


@contextmanager
def rollout_trace_attr(**attributes: Any) -> Generator[None]:
    """Does nothing: the worker traces every episode."""
    del attributes
    yield


@dataclass(frozen=True)
class DictConfigWrap:
    """Holds a configuration."""

    config: Any


@dataclass(frozen=True)
class ToolListWrap:
    """Holds tools."""

    tools: list[Any]


class LLMServerClient:
    """Placeholder for annotations; loops get the object of `kestrl.compat.verl.loops`."""


AsyncLLMServerManager = LLMServerClient
"""Name of `LLMServerClient` before verl 0.8."""


@dataclass(frozen=True)
class MergeResult:
    """Token history after something was appended."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: list[int] = field(default_factory=list[int])
    removed_prefix_token_count: int = 0


def register(agent_name: str) -> Callable[[LoopClass], LoopClass]:
    """Does nothing: the manifest's `agent.loop` names the class."""
    del agent_name
    return lambda loop_class: loop_class


def rollout_trace_op(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Returns the function unchanged: the worker traces every turn and call."""

    @functools.wraps(function)
    async def run(*args: Any, **options: Any) -> Any:
        return await function(*args, **options)

    return run


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Generator[None]:
    """Adds the seconds inside to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


class AgentLoopBase(ABC):
    """Base class of loops for verl."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: DictConfigWrap,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        del hf_model_type, kwargs
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config
        self.apply_chat_template_kwargs: dict[str, Any] = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Runs one episode."""

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise UserCodeError("images, video and audio are not supported", code="unsupported_content")

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        self._assert_mm_supported(bool(audio_data))
        return {}

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns nothing: only text is supported, and other content raises an error when it is rendered."""
        del messages
        return {}

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Former name of `process_multi_modal_info`."""
        return await self.process_multi_modal_info(messages)

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: dict[str, Any]) -> None:
        """Returns nothing: video is not supported."""
        del videos, mm_inputs

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> list[int]:
        """Token ids of the prompt; with `remove_system_prompt`, those that follow the model's turn when these messages
        come next.
        """
        self._assert_mm_supported(any(media.get(kind) for kind in ("images", "videos", "audios")))
        if remove_system_prompt:
            following: list[int] = self.tokenizer.continue_chat(messages, tools=tools)
            return following
        ids: list[int] = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        return ids

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """The first prompt's ids."""
        return await self.apply_chat_template(messages, tools, **media)

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Appends messages of tools or users."""
        new: list[int] = self.tokenizer.extend_chat(previous_messages, updated_messages, runtime_token_ids, tools=tools)
        merged = MergeResult([*runtime_token_ids, *new], len(new))
        scores = None if response_logprobs is None else [*response_logprobs, *([0.0] * len(new))]
        return merged, [*response_mask, *([0] * len(new))], scores

    async def ct_merge_non_assistant_msg(
        self, *args: Any, **options: Any
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Another name of `ct_merge_context_msg`."""
        return await self.ct_merge_context_msg(*args, **options)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Appends what the model generated."""
        count = len(assistant_token_ids)
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count, "assistant")
        scores = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [0.0] * count)]
        return merged, [*response_mask, *([1] * count)], scores

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        # verl truncates on the left; here a prompt that is too long fails, because a truncated one is a different task.
        return prompt_ids
