"""The model under training: the base as engines have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kestrl_learner.model import PolicyModel

from .fakes import VOCABULARY


def scores_twice(policy: PolicyModel) -> None:
    ids = [1, 5, 9, 2, 7, 3]
    for adapter in (False, True):
        assert policy.score(ids, adapter=adapter) == policy.score(ids, adapter=adapter)


def test_dropout_of_a_base_is_off(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = policy_of(folder)
    scores_twice(policy)
    assert policy.score([1, 5, 9], adapter=False) == policy_of(models["llama"]).score([1, 5, 9], adapter=False)


def test_gpt2_whose_dropout_is_on_by_default_can_be_trained(
    policy_of: Callable[..., PolicyModel], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = policy_of(tmp_path)
    scores_twice(policy)
    assert policy.parameters()
