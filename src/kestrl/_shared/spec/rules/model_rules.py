"""Rules of a model's config.json: what an engine refuses minutes later. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from kestrl._shared.spec.job import AgentRLJob, JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.rules.learner_rules import LAYERS

UNSCALED = frozenset({"default", "llama3", "longrope", "su", "mrope"})
"""Kinds of rotary positions whose `max_position_embeddings` is the limit itself; for others it is multiplied by a
factor. As in vLLM's `_get_and_verify_max_len`."""


def model_problems(spec: JobSpec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a job with a model.

    Args:
        spec: The job.
        config: The fields of its config.json; those of the text model may be within `text_config`.
    """
    text = _text_fields(config)
    limit = positions(text)
    length = spec.inference.context_length
    if limit is not None and length > limit:
        yield Problem(
            "spec.inference.contextLength",
            f"{length} tokens are more than the {limit} positions of the model; use at most {limit}",
        )
    yield from _heads(spec.inference.accelerator.count, text)
    layers, checkpointed = _count(text, "num_hidden_layers"), spec.learner.checkpointed_layers
    if layers is not None and checkpointed is not None and checkpointed > layers:
        yield Problem(LAYERS, f"{checkpointed} are more than the {layers} layers of the model; use at most {layers}")


def fitted(job: AgentRLJob, config: Mapping[str, Any]) -> AgentRLJob:
    """The job with all positions of the model as its contextLength, where these are fewer than the default and the
    manifest sets none; then at most half of them are maxTokens, unless the manifest sets these.
    """
    inference, agent, limit = job.spec.inference, job.spec.agent, positions(_text_fields(config))
    if limit is None or limit >= inference.context_length or "context_length" in inference.model_fields_set:
        return job
    inference = inference.model_copy(update={"context_length": limit})
    if "max_tokens" not in agent.model_fields_set:
        agent = agent.model_copy(update={"max_tokens": min(agent.max_tokens, max(1, limit // 2))})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"inference": inference, "agent": agent})})


def positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that a model's positions allow; None if it is not known."""
    limit = _count(config, "max_position_embeddings")
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if limit is None or not isinstance(rope, Mapping):
        return None
    fields = cast("Mapping[str, Any]", rope)
    if any(isinstance(value, Mapping) for value in fields.values()):  # by kind of layer
        return None
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind in UNSCALED:
        return limit
    factor: Any = fields.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    return int((_count(fields, "original_max_position_embeddings") or limit) * factor)


def _text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config: Any = config.get("text_config")
    return cast("Mapping[str, Any]", text_config) if isinstance(text_config, Mapping) else config


def _heads(devices: int, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Attention heads that cannot be divided among the devices of an engine."""
    heads = _count(config, "num_attention_heads")
    if devices == 1 or heads is None:
        return
    groups = _count(config, "num_key_value_heads") or heads
    if heads % devices or (groups % devices if groups >= devices else devices % groups):
        usable = [
            n for n in range(1, devices) if heads % n == 0 and (groups % n == 0 if groups >= n else n % groups == 0)
        ]
        yield Problem(
            "spec.inference.accelerator.count",
            f"the {heads} attention heads of the model ({groups} of keys and values) cannot be divided among {devices} "
            f"devices; use {' or '.join(map(str, usable))}",
        )


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    number: Any = fields.get(name)
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None
