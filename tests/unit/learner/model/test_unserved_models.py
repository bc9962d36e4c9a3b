"""Base models and adapter targets that engines cannot serve, refused before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.local.check import check_job
from kestrl._shared.spec.load import ProblemsError, parse_job
from kestrl._shared.spec.rules.adapter_rules import expert_problems
from kestrl._shared.spec.sft import parse_sft_job
from kestrl.errors import UserInputError
from kestrl_learner.model.policy_model import PolicyModel

QWEN3_MOE = {"model_type": "qwen3_moe", "hidden_size": 32, "num_experts": 4, "num_hidden_layers": 1}


def document(kind: str, base: str, targets: Any = "all-linear") -> dict[str, Any]:
    spec: dict[str, Any] = {
        "model": {"base": base, "adapter": {"targets": targets}},
        "data": {"train": {"uri": "train.jsonl"}},
    }
    if kind == "AgentRLJob":
        spec["rewards"] = [{"rule": "format"}]
    return {"apiVersion": "kestrl.dev/v1alpha1", "kind": kind, "metadata": {"name": "job"}, "spec": spec}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_local_experts": 8}, "num_local_experts: 8"),
        ({"n_routed_experts": 64}, "n_routed_experts: 64"),
        ({"text_config": {"num_experts": 128}}, "num_experts: 128"),
        ({"num_experts": 1, "n_routed_experts": None}, ""),
        ({"hidden_size": 32}, ""),
    ],
)
def test_experts_are_found_in_a_config(config: dict[str, Any], named: str) -> None:
    found = [str(problem) for problem in expert_problems(config, "org/model")]
    assert len(found) == bool(named)
    assert all(f"org/model is a mixture of experts ({named})" in text for text in found)


def test_a_mixture_of_experts_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_MOE))
    job = parse_job(document("AgentRLJob", "model"))
    problems = check_job(job, base=tmp_path, cache_dir=tmp_path / "cache", data=False).problems
    assert [text for text in problems if "num_experts: 4" in text and text.startswith("spec.model.base: ")]


def test_the_learner_refuses_a_mixture_of_experts(policy_of: Callable[..., PolicyModel], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    with pytest.raises(
        UserInputError, match=r"^spec.model.base: .* is a mixture of experts \(num_(local_)?experts: 4\)"
    ):
        policy_of(tmp_path)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_targets_are_refused_alike_for_both_kinds_of_jobs(target: str) -> None:
    for kind, parse in (("AgentRLJob", parse_job), ("SFTJob", parse_sft_job)):
        with pytest.raises(ProblemsError) as raised:
            parse(document(kind, "demo://tiny", ["q_proj", target]))
        assert f"spec.model.adapter.targets: {target.rpartition('.')[2]} is" in str(raised.value)


def test_a_layer_that_is_not_linear_is_refused_by_the_learner(models: dict[str, Path]) -> None:
    given: dict[str, Any] = {"dtype": "float32", "rank": 4, "alpha": 8.0, "seed": 1}
    with pytest.raises(UserInputError) as raised:
        PolicyModel(str(models["llama"]), targets=["embed_tokens"], **given)
    assert str(raised.value) == (
        "spec.model.adapter.targets: model.embed_tokens is a layer Embedding; engines serve adapters of linear layers "
        "only, so remove it"
    )
    PolicyModel(str(models["llama"]), targets=["q_proj"], **given)
