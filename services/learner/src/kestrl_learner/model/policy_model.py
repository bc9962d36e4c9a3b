"""The policy model: a frozen base with a LoRA adapter."""
# transformers and peft have loose types; values from them are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from kestrl._shared.spec.rules.adapter_rules import TARGETS, unserved
from kestrl.errors import UserInputError
from kestrl_learner.batch.rows import TrainGroup
from kestrl_learner.model.compiled_layers import TRIAL
from kestrl_learner.model.rounded_adapter import round_adapter, rounds_adapter
from kestrl_learner.model.tokenizer_files import TokenizerFiles
from kestrl_learner.model.trained_model import ModelOptions, TrainedModel


class PolicyModel(TrainedModel):
    """A frozen base with a LoRA adapter.

    Args:
        path: Folder or Hugging Face id of the base model; only read.
        dtype: Of the base's weights: float32 or bfloat16.
        rank: Rank of the adapter.
        alpha: Scaling of the adapter.
        targets: Modules that get an adapter, or `all-linear`.
        seed: Seed of the adapter's initialisation (A random, B zero: version 0 equals the base).
        rounded: Whether passes compute with copies of the adapter in bfloat16; None is `rounds_adapter`'s choice. It
            has no effect on a base in float32.
        options: As of `TrainedModel`.

    Raises:
        UserInputError: As of `TrainedModel`, or a target gets no adapter.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        rank: int,
        alpha: float,
        targets: str | Sequence[str],
        seed: int,
        rounded: bool | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        self.config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType] - an int in its types, a factor in fact
            target_modules=targets if isinstance(targets, str) else list(targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=path,
        )
        self._rounded = rounds_adapter(dtype, options.get("device", "cpu")) if rounded is None else rounded
        super().__init__(path, dtype=dtype, seed=seed, **options)

    @property
    def peft(self) -> Any:
        """The base with the adapter."""
        return self.network

    def _trainable(self, base: Any) -> Any:
        try:
            peft_model: Any = get_peft_model(base, self.config)
        except ValueError as error:
            raise UserInputError(f"{TARGETS}: {error}") from error
        _refuse_other_layers(peft_model)
        if self._rounded:
            round_adapter(peft_model)
        return peft_model

    def _trial(self) -> Iterator[Tensor]:
        yield from super()._trial()
        yield from self.reference_logprobs(TRIAL, 1.0)
        for adapter in (True, False):
            yield torch.tensor(self.score(TRIAL.rows[0].token_ids, adapter=adapter))

    def trained_state(self) -> dict[str, Tensor]:
        return self.adapter_state()

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        self.load_adapter_state(state)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the modules that carry the adapter."""
        modules = self.config.target_modules
        return (modules,) if isinstance(modules, str) else tuple(sorted(modules or ()))

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter's weights under peft's names, float32 on the CPU, contiguous."""
        state: dict[str, Tensor] = get_peft_model_state_dict(self.peft)
        return {name: state[name].detach().to("cpu", torch.float32).contiguous() for name in sorted(state)}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(self.peft, state)

    def reference_logprobs(self, group: TrainGroup, temperature: float) -> list[Tensor]:
        """Log-probabilities under the base model, in the parts that `logprobs` yields, without gradient."""
        with torch.no_grad(), self.without_adapter():
            return [logprobs for _, logprobs in self.logprobs(group, temperature)]

    @contextmanager
    def without_adapter(self) -> Generator[None]:
        """The base model within the context."""
        with self.peft.disable_adapter():
            yield

    def score(self, token_ids: Sequence[int], *, adapter: bool) -> list[float]:
        """Log-probability of every token after the first, at temperature 1, with or without the adapter."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        with torch.no_grad():
            if adapter:
                logits = self.peft(input_ids=ids, use_cache=False).logits
            else:
                with self.peft.disable_adapter():
                    logits = self.peft(input_ids=ids, use_cache=False).logits
            scores = torch.log_softmax(logits[0, :-1].float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
        return [float(score) for score in scores]


def _refuse_other_layers(network: Any) -> None:
    """Raises UserInputError if a module with an adapter is not linear."""
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear | Conv1D):
            kind = type(module.get_base_layer()).__name__
            raise UserInputError(f"{TARGETS}: {unserved(name.removeprefix('base_model.model.'), f'a layer {kind}')}")


def merge(model: str, adapter: Path, out: Path) -> None:
    """Writes the base model with an adapter merged in, with its tokenizer.

    Raises:
        UserInputError: The base cannot be loaded.
    """
    from peft import PeftModel

    tokenizer = TokenizerFiles(model)
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    except (OSError, ValueError) as error:
        raise UserInputError(f"{model} cannot be loaded: {error}") from error
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)
