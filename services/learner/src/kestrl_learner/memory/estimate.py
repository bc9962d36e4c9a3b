"""`python -m kestrl_learner.memory.estimate`: the peak memory of a step, before anything is loaded.

The learner's own model and optimizer run on torch's fake tensors, which have shapes and no storage: forward pass,
backward pass and update of the largest pass of a step, with every tensor counted while it exists. On several ranks it
is the memory of one, with the layers sharded and gathered by FSDP2 itself. Only the config.json of the base model is
read.
"""
# transformers and peft have loose types; values from them are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig

from kestrl._shared.checking import Facts, run_check
from kestrl._shared.plan.memory import MemoryEstimate, MemoryPart, MemorySettings
from kestrl.errors import UserInputError
from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.packing import Kernel
from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.memory.fake_ranks import CountedGather, count_gathers, fake_mesh
from kestrl_learner.memory.live_bytes import LiveBytes
from kestrl_learner.model.checkpointing import layers_of
from kestrl_learner.model.full_model import FullModel
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.model.rounded_adapter import RoundedLinear, rounds_adapter
from kestrl_learner.model.trained_model import ModelOptions, TrainedModel
from kestrl_learner.ranks.sharding import shard_layers

PROGRAM_BYTES = {"cpu": 768 * 2**20}
"""Resident memory of the learner without tensors: 714 to 802 MiB were measured on a CPU."""
DEVICE_BYTES = 512 * 2**20
"""Allowance for the context of another device and its kernels' workspaces."""
UPDATES = 2
"""Updates that are counted: the optimizer's state exists from the second on."""


class ShapedModel(TrainedModel):
    """A model without weights; made with `torch.device("meta")`, its tensors are replaced by fake ones."""

    trained_part: MemoryPart
    """What the weights under training are counted as."""

    live: LiveBytes
    trained_on: str
    """Type of the device whose memory is estimated."""
    host: int = 0
    """Bytes that the latest pass keeps in host memory."""

    def _saving(self) -> AbstractContextManager[object]:
        """Saved tensors leave the device as their shapes, and new ones come back."""
        if not self._offloads:
            return nullcontext()
        self.host = 0

        def leave(saved: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.host += saved.nbytes
            return saved.shape, saved.dtype

        return saved_tensors_hooks(leave, lambda shape_dtype: torch.empty(shape_dtype[0], dtype=shape_dtype[1]))

    @property
    def _device_type(self) -> str:
        return self.trained_on

    def _packs_exactly(self, base: Any) -> bool:  # noqa: ARG002 - without weights there are no states to compare
        return True

    def _sharing_kernel(self) -> Kernel | None:
        return Kernel.ROWS

    def _load_base(self, path: str, config: Any, dtype: torch.dtype) -> Any:  # noqa: ARG002 - the config says all
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    def _token_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropies: list[Tensor] | None
    ) -> Tensor:
        with self.live.counting(MemoryPart.LOGPROBS):
            return super()._token_logprobs(hidden, targets, temperature, entropies)

    def _check_head(self) -> None:
        """Nothing: without weights there are no logits to compare."""

    def use_fake_tensors(self, live: LiveBytes) -> None:
        """Replaces parameters and buffers by fake tensors of the CPU; those that modules share stay shared."""
        weights = list(self.network.parameters())
        fake_parameters: dict[int, nn.Parameter] = {}
        for weight in weights:
            with live.counting(self.trained_part if weight.requires_grad else MemoryPart.BASE):
                storage = torch.empty(weight.shape, dtype=weight.dtype)
                fake_parameters[id(weight)] = nn.Parameter(storage, requires_grad=weight.requires_grad)
        for module in self.network.modules():
            parameters = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, weight in parameters:
                setattr(module, name, fake_parameters[id(weight)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        self.device, self.live = torch.device("cpu"), live


class ShapedPolicyModel(ShapedModel, PolicyModel):
    """The policy model without weights."""

    trained_part = MemoryPart.ADAPTER

    def pass_logprobs(self, pieces: Sequence[Piece], temperature: float, entropies: list[Tensor] | None) -> Tensor:
        with self.live.counting(MemoryPart.ROUNDED):
            for module in self.network.modules():
                if isinstance(module, RoundedLinear):
                    module.current_copies()
        return super().pass_logprobs(pieces, temperature, entropies)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shards the layers over ranks, as loading with weights does."""
        with self.live.counting(MemoryPart.BASE):
            shard_layers(self.network.get_base_model(), self._body, mesh)
        count_gathers(self._body, CountedGather(self.live, over_gloo=self.trained_on == "cpu"))
        self.live.restart()  # ranks load the base in the memory of the host


class ShapedFullModel(ShapedModel, FullModel):
    """A model of which all parameters are trained, without weights."""

    trained_part = MemoryPart.BASE

    def _sharing_kernel(self) -> Kernel | None:
        return FullModel._sharing_kernel(self)


def _shaped(settings: MemorySettings) -> ShapedModel:
    policy = settings.policy
    options = ModelOptions(device="meta", **policy.pass_options())
    if settings.parameters == "all":
        return ShapedFullModel(policy.model, dtype=policy.dtype, seed=policy.seed, **options)
    return ShapedPolicyModel(
        policy.model,
        dtype=policy.dtype,
        rank=policy.rank,
        alpha=policy.alpha,
        targets=policy.targets,
        seed=policy.seed,
        rounded=rounds_adapter(policy.dtype, policy.device),
        **options,
    )


def estimate(settings: MemorySettings) -> MemoryEstimate:
    """The peak of a step on one rank, by what the memory is used for.

    Raises:
        UserInputError: The model's config.json cannot be read, or its family cannot be computed without weights.
    """
    policy = settings.policy
    with torch.device("meta"):
        model = _shaped(settings)
    model.trained_on = policy.device.partition(":")[0]
    group = longest_group(settings)
    passes = model.passes([(number, group) for number in range(settings.groups)], least_passes=settings.ranks)
    pieces = max(passes, key=model.tokens_of)
    live = LiveBytes()
    try:
        with _ranks(settings.ranks) as mesh, FakeTensorMode(), live:
            model.use_fake_tensors(live)
            if mesh is not None and isinstance(model, ShapedPolicyModel):
                model.shard(mesh)
            of_rank = -(-len(passes) // settings.ranks)
            # A second pass begins with the gradient of the first.
            _updates(model, live, pieces, min(2, of_rank), settings.ranks)
    except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserInputError(
            f"spec.model.base: the memory of this family of models cannot be estimated: {error} depends on values"
        ) from error
    peak = live.peak
    parts = {part: peak[part] for part in MemoryPart if part in peak}
    copies = _copied(settings, parts.get(MemoryPart.ADAPTER, 0))
    program = PROGRAM_BYTES.get(policy.device, DEVICE_BYTES)
    extra = {part: size for part, size in ((MemoryPart.COPIES, copies), (MemoryPart.PROGRAM, program)) if size}
    return MemoryEstimate(
        parts=parts | extra,
        rows=sum(len(piece.rows) for piece in pieces),
        host=model.host,
        layers=len(layers_of(model.network)),
        cached_token=cached_token(model.network.config),
    )


def cached_token(config: PretrainedConfig) -> int:
    """Bytes of the keys and values of a token in all layers; of families with a smaller cache, a bound."""
    text: Any = config.get_text_config()
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * keys * width * text.dtype.itemsize


def longest_group(settings: MemorySettings) -> TrainGroup:
    """A group of rows of the asked length; the first is a token shorter, since padding costs an attention mask."""
    shared = settings.kind == "AgentRLJob"
    return TrainGroup(
        id="",
        prompt=array("i", [1] * settings.prompt) if shared else array("i"),
        rows=[
            _row(
                number,
                unsampled=0 if shared else settings.prompt,
                sampled=settings.completion - (number == 0 and settings.group_rows > 1 and settings.completion > 1),
            )
            for number in range(settings.group_rows)
        ],
    )


def _row(number: int, *, unsampled: int, sampled: int) -> TrainRow:
    length = unsampled + sampled
    return TrainRow(
        token_ids=array("i", [1] * length),
        mask=bytes(unsampled) + bytes([1] * sampled),
        behaviour=array("f", bytes(4 * length)),
        advantages=array("d", [1.0] * length),
        sequence=number,
        on_policy=b"\1" * sampled,
        policies=[""] * sampled,
        engines=[""] * sampled,
    )


def _ranks(count: int) -> AbstractContextManager[DeviceMesh | None]:
    return nullcontext() if count == 1 else fake_mesh(count)


def _updates(model: ShapedModel, live: LiveBytes, pieces: Sequence[Piece], passes: int, ranks: int) -> None:
    """Runs updates of some passes over the same pieces, as the trainer does on one of several ranks."""

    def counted(weight: Tensor) -> None:
        live.recount(_gradient(weight), MemoryPart.GRADIENTS)

    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(counted)
    for _ in range(UPDATES):
        for _ in range(passes):
            live.part = MemoryPart.ACTIVATIONS
            logprobs = model.pass_logprobs(pieces, 1.0, [])
            live.part = MemoryPart.ACTIVATIONS
            (-logprobs.sum()).backward()
            del logprobs
        if ranks > 1:
            with live.counting(MemoryPart.GRADIENTS):
                torch.cat([_gradient(weight).reshape(-1) for weight in model.parameters()])  # `Group.add` sums it
        with live.counting(MemoryPart.OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "the hook runs after the gradient is accumulated"
    return weight.grad


def _copied(settings: MemorySettings, adapter: int) -> int:
    """Bytes of the copies that the trainer keeps: published versions on the host, and what undoes several updates,
    which is the adapter with the two moments of the optimizer.
    """
    on_host = settings.published * adapter if settings.policy.device == "cpu" else 0
    return on_host + (3 * adapter if settings.several_updates else 0)


def _facts(settings: MemorySettings) -> Facts:
    return estimate(settings).model_dump(mode="json")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run_check(MemorySettings, _facts)
