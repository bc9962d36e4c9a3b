"""verl's own functions, without importing verl: the golden tests' independent reference.

verl's modules import ray and vLLM. Functions are taken from their source one by one, without decorators, which only
register them, and see stand-ins for configuration classes and for metrics that no test reads.
"""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.wheels import unpacked

RELEASE = "verl==0.9.1"
TENSORS = "verl/utils/torch_functional.py"
SOURCES = {
    TENSORS: {"masked_sum", "masked_mean", "masked_var", "masked_whiten"},
    "verl/trainer/ppo/core_algos.py": {
        "compute_grpo_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "compute_rloo_outcome_advantage",
        "compute_gdpo_outcome_advantage",
        "agg_loss",
        "compute_policy_loss_vanilla",
        "compute_policy_loss_dppo_tv",
        "compute_policy_loss_gspo",
        "compute_policy_loss_sapo",
        "compute_policy_loss_cispo",
        "kl_penalty_forward",
    },
    "verl/trainer/ppo/rollout_corr_helper.py": {
        "SAFETY_BOUND",
        "SUPPORTED_ROLLOUT_RS_OPTIONS",
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
        "_parse_rollout_is_threshold",
        "_parse_rollout_rs_thresholds",
        "compute_rollout_rejection_mask",
        "compute_rollout_correction_weights",
    },
}
"""What is taken from which file of the wheel."""


class AlgoConfig:
    """Stand-in for a class of verl that no function here is given."""


class ActorConfig:
    """The fields of verl's class that the losses read."""

    def __init__(self, **fields: Any) -> None:
        self.global_batch_info: dict[str, Any] = {}
        self.__dict__.update(fields)

    def get(self, name: str, default: Any) -> Any:
        return self.__dict__.get(name, default)


def no_metrics(**_: Any) -> dict[str, float]:
    return {}


def name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def definitions(source: str, names: set[str]) -> list[ast.stmt]:
    """The top-level definitions of `names` in `source`, without decorators and annotations of functions."""
    found = [node for node in ast.parse(source).body if name_of(node) in names]
    assert {name_of(node) for node in found} == names
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return found


def verl_functions() -> SimpleNamespace:
    """The functions of `SOURCES`, and `ActorConfig`."""
    folder = unpacked(RELEASE)
    namespace: dict[str, Any] = {
        **dict.fromkeys(("DataProto", "RolloutCorrectionConfig", "PolicyLossConfig", "DictConfig"), Any),
        "AlgoConfig": AlgoConfig,
        "ActorConfig": ActorConfig,
        "compute_is_metrics": no_metrics,
        "compute_rs_metrics": no_metrics,
        "math": math,
        "np": np,
        "torch": torch,
        "defaultdict": defaultdict,
        "Any": Any,
    }
    future = ast.parse("from __future__ import annotations").body
    for path, names in SOURCES.items():
        tree = ast.Module(future + definitions((folder / path).read_text(encoding="utf-8"), names), [])
        exec(compile(tree, str(folder / path), "exec"), namespace)
        if path == TENSORS:
            namespace["verl_F"] = SimpleNamespace(**{name: namespace[name] for name in names})
    return SimpleNamespace(**namespace)
