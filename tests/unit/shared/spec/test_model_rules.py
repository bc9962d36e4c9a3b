"""What a model's config.json does not allow, before an engine says it minutes later."""

from __future__ import annotations

from typing import Any

import pytest

from kestrl._shared.spec.load import parse_job, with_overrides
from kestrl._shared.spec.rules.model_rules import fitted, model_problems, positions

MANIFEST = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/models/any"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "exact_answer"}],
    },
}


def problems(config: dict[str, Any], *overrides: str) -> list[str]:
    return [str(problem) for problem in model_problems(parse_job(with_overrides(MANIFEST, overrides)).spec, config)]


def test_a_context_beyond_the_positions_names_field_and_limit() -> None:
    (problem,) = problems({"max_position_embeddings": 2048})
    assert problem == (
        "spec.inference.contextLength: 4096 tokens are more than the 2048 positions of the model; use at most 2048"
    )
    assert problems({"max_position_embeddings": 4096}) == []
    assert problems({"text_config": {"max_position_embeddings": 4095}})


def test_more_checkpointed_layers_than_the_model_has_name_its_number() -> None:
    overrides = ("learner.gradientCheckpointing=true", "learner.checkpointedLayers=25")
    (problem,) = problems({"num_hidden_layers": 24}, *overrides)
    assert problem == "spec.learner.checkpointedLayers: 25 are more than the 24 layers of the model; use at most 24"
    assert problems({"num_hidden_layers": 25}, *overrides) == []


@pytest.mark.parametrize(
    ("limit", "overrides", "length"),
    [(2048, (), 2048), (8192, (), 4096), (2048, ("inference.contextLength=4096",), 4096), (None, (), 4096)],
)
def test_a_length_that_the_manifest_does_not_set_fits_the_model(
    limit: int | None, overrides: tuple[str, ...], length: int
) -> None:
    job = parse_job(with_overrides(MANIFEST, overrides))
    assert fitted(job, {"max_position_embeddings": limit}).spec.inference.context_length == length


def test_half_of_a_short_context_is_sampled_unless_the_manifest_says_more() -> None:
    short = {"max_position_embeddings": 1000}
    assert fitted(parse_job(MANIFEST), short).spec.agent.max_tokens == 500
    assert fitted(parse_job(with_overrides(MANIFEST, ("agent.maxTokens=900",))), short).spec.agent.max_tokens == 900


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 1000),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100}}, 1000),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 2000),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}}, 2000),
        ({"rope_scaling": {"rope_type": "unheard-of"}}, None),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, None),
        ({"rope_scaling": None}, 1000),
    ],
)
def test_positions_are_scaled_as_the_engine_scales_them(rope: dict[str, Any], limit: int | None) -> None:
    assert positions({"max_position_embeddings": 1000, **rope}) == limit


def test_positions_that_a_config_does_not_name_are_not_guessed() -> None:
    assert positions({}) is None
    assert positions({"max_position_embeddings": True}) is None


@pytest.mark.parametrize(
    ("devices", "heads", "groups", "usable"),
    [(2, 14, 2, ""), (4, 14, 2, "1 or 2"), (8, 32, 8, ""), (16, 32, 8, ""), (3, 32, 8, "1 or 2"), (4, 6, 3, "1 or 3")],
)
def test_heads_are_divided_among_the_devices_of_an_engine(devices: int, heads: int, groups: int, usable: str) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": groups}
    shown = problems(config, "inference.accelerator.profile=nvidia", f"inference.accelerator.count={devices}")
    assert [line.rpartition("; use ")[2] for line in shown] == ([usable] if usable else [])
    assert all(line.startswith("spec.inference.accelerator.count: the ") for line in shown)
