"""The base in host memory while an engine has the device: it comes back as it left, and nothing computes meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.learner.fakes import wide_model
from tests.unit.learner.train.test_training import algorithm, gradients, make_groups
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from kestrl.errors import PlaceError
from kestrl_learner.model import base_weights
from kestrl_learner.model.base_weights import BaseAway, BaseWeights, DeviceFull
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train.trainer import Trainer

IDS = [1, 5, 9, 2, 7, 3]


def frozen(network: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in network.parameters() if not weight.requires_grad]


def content(tensors: Sequence[Tensor]) -> list[bytes]:
    return [bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()) for tensor in tensors]


def holders(addresses: set[int]) -> int:
    """Number of tensors in storages at these addresses."""
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)]
    return sum(tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in addresses for tensor in tensors)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_comes_back_bit_by_bit(
    kind: str, dtype: str, models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    policy = policy_of(models[kind], disturb=0.3, dtype=dtype)
    weights = frozen(policy.network)
    before, adapter = content(weights), content(policy.parameters())
    scores = policy.score(IDS, adapter=True)
    layouts = [(weight.shape, weight.stride(), weight.dtype) for weight in weights]
    addresses = {weight.untyped_storage().data_ptr() for weight in weights}
    for _ in range(3):
        policy.base_weights.leave()
        assert all(weight.untyped_storage().size() == 0 for weight in weights)
        assert holders(addresses) == 0, "its memory is free"
        assert content(policy.parameters()) == adapter, "the adapter stays"
        policy.base_weights.come_back()
        addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        assert content(weights) == before
        assert [(weight.shape, weight.stride(), weight.dtype) for weight in weights] == layouts
        assert frozen(policy.network) == weights, "modules hold the same parameters"
    assert policy.score(IDS, adapter=True) == scores


def test_tied_weights_stay_tied(tmp_path: Path, policy_of: Callable[..., PolicyModel]) -> None:
    policy = policy_of(wide_model(tmp_path))
    model = policy.network.get_base_model()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    size = sum(weight.nbytes for weight in frozen(policy.network))
    policy.base_weights.leave()
    assert policy.base_weights._host is not None
    assert sum(copy.nbytes for copy in policy.base_weights._host.values()) == size, "one copy of both"
    policy.base_weights.come_back()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert policy.base_weights.away is False


def test_experts_and_strides_come_back() -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=64, num_experts=4, num_experts_per_tok=2, **shape, **heads)
    network: Any = Qwen3MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(requires_grad=False).eval()
    query = network.model.layers[0].self_attn.q_proj.weight
    query.data = query.data.T.contiguous().T
    assert any(weight.dim() == 3 for weight in network.parameters()), "all experts of a layer in one weight"
    ids = torch.tensor([IDS])
    before, logits = content(frozen(network)), network(input_ids=ids).logits
    base = BaseWeights(network, torch.device("cpu"))
    base.leave()
    with pytest.raises(BaseAway):
        network.model.layers[0].mlp(torch.zeros(1, 2, 32, dtype=torch.bfloat16))
    base.come_back()
    assert query.stride() == (1, 32)
    assert content(frozen(network)) == before
    assert torch.equal(network(input_ids=ids).logits, logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_between_which_the_base_is_away_are_the_same(
    checkpointing: bool, models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    def trained(*, away: bool) -> tuple[list[float], list[bytes], list[bytes]]:
        policy = policy_of(models["qwen3"], disturb=0.3, gradient_checkpointing=checkpointing)
        trainer = Trainer(policy, algorithm(), 1.0)
        losses: list[float] = []
        for step in range(3):
            if away:
                policy.base_weights.leave()
                policy.base_weights.come_back()
            losses.append(trainer.step(make_groups(), step).loss)
        slopes = gradients(policy, make_groups())[1]
        return losses, content(slopes), content(policy.parameters())

    assert trained(away=True) == trained(away=False)


def test_nothing_computes_while_the_base_is_away(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel]
) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    trainer, group = Trainer(policy, algorithm(), 1.0), make_groups()[0]
    before = policy.score(IDS, adapter=True)
    hidden = torch.zeros(1, 1, 16)
    attempts: list[Callable[[], object]] = [
        lambda: policy.score(IDS, adapter=True),
        lambda: policy.score(IDS, adapter=False),
        lambda: trainer.step([group], 0),
        lambda: trainer.logprob_sum([group]),
        lambda: policy.reference_logprobs(group, 1.0),
        lambda: policy.empty_pass(shared=False),
        lambda: policy.network(input_ids=torch.tensor([IDS])),
        lambda: policy._head(hidden),
    ]
    policy.base_weights.leave()
    for attempt in attempts:
        with pytest.raises(BaseAway, match="the base is in host memory while an engine has the device"):
            attempt()
    state = policy.adapter_state()
    policy.load_adapter_state(state)
    trainer.restore(trainer.state())
    policy.base_weights.come_back()
    assert policy.score(IDS, adapter=True) == before, "a checkpoint needs no base"


def test_a_base_that_does_not_fit_frees_what_had_come_back(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(models["qwen3"])
    weights, before = frozen(policy.network), policy.score(IDS, adapter=True)
    policy.base_weights.leave()
    empty_like, sizes = torch.empty_like, iter(range(5))

    def full(*arguments: Any, **options: Any) -> Tensor:
        if next(sizes, None) is None:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return empty_like(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", full)
        with pytest.raises(DeviceFull, match="does not fit the device in the learner's turn: tried to allocate 2 GiB"):
            policy.base_weights.come_back()
    assert sum(weight.numel() > 0 for weight in weights) == 5
    with pytest.raises(BaseAway):
        policy.score(IDS, adapter=True)
    policy.base_weights.leave()
    assert all(weight.untyped_storage().size() == 0 for weight in weights)
    policy.base_weights.come_back()
    assert policy.score(IDS, adapter=True) == before


class Driver:
    """CUDA's registration of host memory, which answers with a code."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.registered |= {} if self.code else {address: size}
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_a_buffer_is_pinned_in_its_own_size_and_for_its_own_time() -> None:
    buffer, driver = torch.empty(1300, dtype=torch.uint8), Driver(0)
    unpin = base_weights.pin(buffer, driver)
    assert driver.registered == {buffer.data_ptr(): 1300}
    unpin()
    assert driver.registered == {}


def test_a_driver_that_does_not_pin_is_an_error_before_anything_leaves(
    models: dict[str, Path], policy_of: Callable[..., PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(models["qwen3"])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(2))
    base = BaseWeights(policy.network, torch.device("cuda"))
    with pytest.raises(PlaceError, match=r"the base's 0\.0 GiB cannot be kept in host memory: cudaHostRegister of "):
        base.leave()
    assert not base.away
    assert policy.score(IDS, adapter=True)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_has_its_memory_back_while_the_base_is_away(
    tmp_path: Path, policy_of: Callable[..., PolicyModel]
) -> None:
    """64 MiB of weights in odd sizes, so that rounding would be seen."""
    folder = wide_model(tmp_path, hidden_size=512, intermediate_size=1100, num_hidden_layers=6, head_dim=64)
    policy = policy_of(folder, disturb=0.3, device="cuda", dtype="bfloat16")
    groups, weights = make_groups(), frozen(policy.network)
    size = sum(weight.nbytes for weight in weights)
    before, scores = content(weights), policy.score(IDS, adapter=True)
    slopes = content(gradients(policy, groups)[1])
    for _ in range(2):
        allocated = torch.cuda.memory_allocated()
        policy.base_weights.leave()
        torch.cuda.empty_cache()
        assert allocated - torch.cuda.memory_allocated() >= size
        assert policy.base_weights._host is not None
        assert all(copy.is_pinned() for copy in policy.base_weights._host.values())
        with pytest.raises(BaseAway):
            policy.score(IDS, adapter=True)
        policy.base_weights.come_back()
        assert content(weights) == before
    assert policy.score(IDS, adapter=True) == scores
    assert content(gradients(policy, groups)[1]) == slopes
