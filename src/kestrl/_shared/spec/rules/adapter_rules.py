"""Rules of an adapter's targets and of its base model: what engines serve as the learner trains it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrl._shared.spec.job import Adapter
from kestrl._shared.spec.problems import Problem

TARGETS = "spec.model.adapter.targets"
EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "word_embeddings", "wte"})
"""Names that families of models give to the embedding of tokens."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a config.json with the number of experts of a layer."""


def target_problems(adapter: Adapter) -> Iterator[Problem]:
    """Problems of targets that can be seen by their names."""
    if isinstance(adapter.targets, str):
        return
    for target in adapter.targets:
        name = target.rpartition(".")[2]
        if name == "lm_head":
            yield Problem(
                TARGETS,
                "lm_head is not applied by vLLM when it computes prompt log-probs, so no version could be verified; "
                "remove it",
            )
        elif name in EMBEDDINGS:
            yield Problem(TARGETS, unserved(name, "an embedding"))


def unserved(name: str, kind: str) -> str:
    """Why a module gets no adapter."""
    return f"{name} is {kind}; engines serve adapters of linear layers only, so remove it"


def expert_problems(config: Mapping[str, Any], model: str) -> Iterator[Problem]:
    """Problems of a mixture of experts.

    Args:
        config: The fields of its config.json; those of the text model may be within `text_config`.
        model: Its address, for the message.
    """
    text: Any = config.get("text_config")
    levels: list[Mapping[str, Any]] = [config, text] if isinstance(text, Mapping) else [config]
    for fields in levels:
        for name in EXPERT_COUNTS:
            count = fields.get(name)
            if isinstance(count, int) and count > 1:
                yield Problem(
                    "spec.model.base",
                    f"{model} is a mixture of experts ({name}: {count}): their weights get no adapter, and engine and "
                    "learner may send a token to different ones, so log-probs would not match; use a dense model",
                )
                return
