"""The names that a file with an agent loop for verl 0.9 imports, with the meanings it relies on.

Used only where verl itself is not installed (it brings ray, torch and a training stack). The signatures are those of verl 0.9.1;
what has no meaning here, such as images, fails when used and says so.
"""

from __future__ import annotations

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from kestrl.errors import UserCodeError

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "DictConfigWrap",
    "LLMServerClient",
    "MergeResult",
    "TokenOutput",
    "ToolListWrap",
    "ToolResponse",
    "register",
    "rollout_trace_op",
    "simple_timer",
]

LoopClass = TypeVar("LoopClass", bound="type[Any]")


class AgentLoopMetrics(BaseModel):
    """What a loop measures of itself."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What a loop returns."""

    model_config = ConfigDict(extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 on tokens the model generated, 0 on the others."""
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}


class TokenOutput(BaseModel):
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class ToolResponse(BaseModel):
    """What a tool returns."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


@dataclass(frozen=True)
class DictConfigWrap:
    """Holds a configuration."""

    config: Any


@dataclass(frozen=True)
class ToolListWrap:
    """Holds tools."""

    tools: list[Any]


class LLMServerClient:
    """Only a name for annotations: the one that a loop is given is made by `kestrl.agents.verl`."""


@dataclass(frozen=True)
class MergeResult:
    """Token history after something was appended."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: list[int] = field(default_factory=list[int])
    removed_prefix_token_count: int = 0


def register(agent_name: str) -> Callable[[LoopClass], LoopClass]:
    """Registers nothing: the manifest's `agent.loop` names the class."""
    del agent_name
    return lambda found: found


def rollout_trace_op(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Traces nothing: the worker traces every turn and call itself."""

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
    """What a loop for verl subclasses."""

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
        """Text has none; a message that is no text fails when it is rendered."""
        del messages
        return {}

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The older name."""
        return await self.process_multi_modal_info(messages)

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: dict[str, Any]) -> None:
        """There is no video."""
        del videos, mm_inputs

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """The prompt's ids."""
        self._assert_mm_supported(any(media.get(kind) for kind in ("images", "videos", "audios")))
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
        """Appends messages that are not the model's."""
        new: list[int] = self.tokenizer.extend_chat(previous_messages, updated_messages, runtime_token_ids, tools=tools)
        merged = MergeResult([*runtime_token_ids, *new], len(new))
        scores = None if response_logprobs is None else [*response_logprobs, *([0.0] * len(new))]
        return merged, [*response_mask, *([0] * len(new))], scores

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
        # verl cuts on the left; here a prompt that is too long fails, for a cut one is another task.
        return prompt_ids
