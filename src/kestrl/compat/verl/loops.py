"""Runs an agent loop that was written for verl, unchanged.

The class gets what verl passes: a server manager, a tokenizer, a configuration, and the fields of the row. Training
uses the tokens that went through the server manager, not those that the loop returns; the returned mask only selects
among them. A loop that edits, re-tokenises or mislabels the model's tokens therefore fails with an error instead of
training on them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kestrl.agents import Call, Conversation, Loop
from kestrl.compat.verl import names, tool_names
from kestrl.errors import UserCodeError
from kestrl.rewards import Score

FIXED = {"min_p": (0, 0.0), "repetition_penalty": (1, 1.0), "n": (1,)}
"""Sampling parameters with the only values that training allows: with others the log-probabilities would belong to
another distribution than the learner's."""
IGNORED = frozenset({"logprobs", "stop_token_ids", "max_tokens", "max_new_tokens", "temperature", "seed"})
"""Parameters that are handled by name or set by the platform."""


FORMATS = {"harmony": "gpt-oss", "qwen_xml": "qwen3_coder"}
"""Tool-call formats by their names in verl."""


class Config(dict[str, Any]):
    """A configuration with attribute access, as in verl."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(
                f"the configuration has no {name!r}; only a part of verl's configuration is available"
            ) from error


def adapt(loop: type[Any], config: Mapping[str, Any]) -> Loop:
    """Converts the class to a loop function; `config` has further constructor arguments, as in verl's agent loop
    configuration.
    """

    async def run(conversation: Conversation) -> Score | None:
        instance = loop(
            trainer_config=names.DictConfigWrap(_config(conversation)),
            server_manager=ServerManager(conversation),
            tokenizer=conversation.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=names.DictConfigWrap(Config()),
            hf_model_type=None,
            tools=names.ToolListWrap([RemoteTool(conversation, tool.to_openai()) for tool in conversation.tools]),
            **config,
        )
        sampling = {
            "temperature": conversation.limits.temperature,
            "top_p": conversation.limits.top_p,
            "top_k": conversation.limits.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        output = await instance.run(sampling, **_fields(conversation))
        return _keep(conversation, output)

    return run


def _keep(conversation: Conversation, output: Any) -> Score | None:
    """Applies the returned mask, and returns the reward of the loop, if any, with its metrics."""
    try:
        prompt, response = list(output.prompt_ids), list(output.response_ids)
        mask = [*([0] * len(prompt)), *(int(bit) for bit in output.response_mask)]
        turns, reward = float(output.num_turns), output.reward_score
        extra: Any = output.extra_fields
        facts = cast(dict[str, Any], dict(extra.get("reward_extra_info") or ()) if extra else {})
    except (AttributeError, TypeError, ValueError) as error:
        raise UserCodeError(f"the loop returned no AgentLoopOutput: {error}", code="bad_output") from error
    conversation.keep([*prompt, *response], mask)
    conversation.metrics["verl.num_turns"] = turns
    return None if reward is None else Score(value=reward, metrics=facts)


def _config(conversation: Conversation) -> Config:
    limits = conversation.limits
    multi_turn = Config(
        enable=True,
        format=FORMATS.get(conversation.tokenizer.tool_call_format, conversation.tokenizer.tool_call_format),
        max_assistant_turns=limits.max_turns,
        max_user_turns=limits.max_turns,
        max_parallel_calls=8,
        # The worker already truncates results by tokens.
        max_tool_response_length=sys.maxsize,
        tool_response_truncate_side="middle",
    )
    rollout = Config(
        name="vllm",
        prompt_length=limits.context_length,
        response_length=limits.context_length,
        temperature=limits.temperature,
        top_p=limits.top_p,
        top_k=limits.top_k or -1,
        calculate_log_probs=True,
        full_determinism=False,
        multi_turn=multi_turn,
        agent=Config(),
    )
    return Config(actor_rollout_ref=Config(rollout=rollout, model=Config()), data=Config())


def _fields(conversation: Conversation) -> dict[str, Any]:
    """Fields of the row under verl's names."""
    scenario = conversation.scenario
    extra = scenario.metadata.get("extra_info", scenario.metadata)
    return {
        **{key: value for key, value in scenario.metadata.items() if key != "extra_info"},
        "raw_prompt": [dict(message) for message in scenario.messages],
        "tools_kwargs": scenario.tools_kwargs,
        "extra_info": extra,
        "index": scenario.ordinal,
        "reward_model": {"style": "rule", "ground_truth": scenario.ground_truth},
    }


class ServerManager:
    """verl's interface to the engines."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **options: Any,
    ) -> names.TokenOutput:
        """Samples a completion of a prompt.

        Raises:
            LimitReached: A limit of the episode leaves no token to sample; if it is not caught, the episode ends with
                the tokens so far.
            UserCodeError: The loop changed how tokens are sampled, or sent more than text.
        """
        del request_id, options  # sessions and priorities are handled by the worker
        if image_data or video_data or audio_data:
            raise UserCodeError("images, video and audio are not supported", code="unsupported_content")
        self._check(sampling_params)
        limit = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        completion = await self._conversation.generate_tokens(
            list(prompt_ids), max_tokens=limit, stop_token_ids=tuple(sampling_params.get("stop_token_ids") or ())
        )
        return names.TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.logprobs),
            stop_reason="completed",
            num_preempted=-1,
        )

    def _check(self, sampling: Mapping[str, Any]) -> None:
        limits = self._conversation.limits
        allowed = {
            **FIXED,
            "temperature": (limits.temperature,),
            "top_p": (limits.top_p,),
            "top_k": (limits.top_k,) if limits.top_k else (-1, 0),
        }
        for name, value in sampling.items():
            if (
                value is None
                or (name in allowed and value in allowed[name])
                or (name in IGNORED and name not in allowed)
            ):
                continue
            raise UserCodeError(
                f"the loop samples with {name}={value!r}; the job's sampling is set in the manifest, for the learner "
                "must "
                "compute the same distribution",
                code="sampling_changed",
            )


class RemoteTool:
    """A tool of the job with verl's `BaseTool` interface. Its session lasts as long as the episode."""

    def __init__(self, conversation: Conversation, schema: dict[str, Any]) -> None:
        self._conversation = conversation
        self.name = str(schema["function"]["name"])
        self.tool_schema = _Schema(schema)

    async def create(self, instance_id: str | None = None, **options: Any) -> tuple[str, tool_names.ToolResponse]:
        """Does nothing: the worker opens the session with the scenario's `create_kwargs`."""
        del options
        return instance_id or self.name, tool_names.ToolResponse()

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **options: Any
    ) -> tuple[tool_names.ToolResponse, float, dict[str, Any]]:
        """Calls the tool; mistakes of the model are returned as text."""
        del instance_id, options
        call = Call(name=self.name, arguments=parameters, raw="")
        (result,) = await self._conversation.call_tools([call])
        return (
            tool_names.ToolResponse(text=result.text),
            float(result.data.get("tool_reward") or 0.0),
            dict(result.data),
        )

    async def release(self, instance_id: str, **options: Any) -> None:
        """Does nothing: the session ends with the episode."""
        del instance_id, options


class _Schema:
    """A tool definition with the one method that loops call."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self.function = Config(cast(dict[str, Any], schema["function"]))

    def model_dump(self, **options: Any) -> dict[str, Any]:
        del options
        return self._schema
