"""A model of which all parameters are trained, and its files: weights, configuration, tokenizer and chat template."""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from kestrl._shared.plan.settings.learner import PolicySettings
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.models import ModelManifest, publish_model
from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.packing import Kernel
from kestrl_learner.model.compiled_layers import Graphs, not_compiled
from kestrl_learner.model.tokenizer_files import TokenizerFiles
from kestrl_learner.model.trained_model import ModelOptions, TrainedModel
from kestrl_learner.ranks.group import RankGroup

FILE_SIZE = "2GB"
"""Largest size of a file of weights: a file is read whole when it is stored."""


class FullModel(TrainedModel):
    """A model of which all parameters are trained. They are kept and updated in float32.

    Args:
        path: Folder or Hugging Face id of the base model; only read.
        dtype: What passes compute in, and what the files hold: float32, or bfloat16 by torch's autocast.
        seed: Of torch.
        options: As of `TrainedModel`.

    Raises:
        UserInputError: As of `TrainedModel`, or the base is quantised, or its generation_config.json is invalid.
    """

    updates_together: ClassVar[bool | None] = False

    def __init__(self, path: str, *, dtype: str, seed: int, **options: Unpack[ModelOptions]) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        super().__init__(path, dtype="float32", seed=seed, **options)

    def _refuse_config(self, config: Any, path: str) -> None:
        super()._refuse_config(config, path)
        if getattr(config, "quantization_config", None) is not None:
            raise UserInputError(
                f"spec.model.base: {path} is quantised, and its weights cannot be trained; name the model that it was "
                "made from, or set spec.training.parameters to adapter"
            )

    def _trainable(self, base: Any) -> Any:
        try:
            base.generation_config.validate(strict=True)  # as it is when it is saved, at the end of the run
        except ValueError as error:
            raise UserInputError(
                f"spec.model.base: its generation_config.json is invalid; correct it: {error}"
            ) from error
        return base.requires_grad_(True)

    def _sharing_kernel(self) -> Kernel | None:
        """None: it is fine-tuned on rows without a shared prompt."""
        return None

    def _compiled(self, group: RankGroup | None) -> Graphs | None:  # noqa: ARG002 - there are no ranks
        return not_compiled("all parameters are trained")

    def trained_state(self) -> dict[str, Tensor]:
        return {
            name: weight.detach().to("cpu", torch.float32).contiguous()
            for name, weight in self.network.named_parameters()
        }

    @torch.no_grad()
    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        for name, weight in self.network.named_parameters():
            weight.copy_(state[name])

    def pass_logprobs(self, pieces: Sequence[Piece], temperature: float, entropies: list[Tensor] | None) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return super().pass_logprobs(pieces, temperature, entropies)

    def save(self, out: Path) -> None:
        """Writes weights and configurations in `dtype`. Weights that modules share are written once."""
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, weight in self.network.state_dict(keep_vars=True).items():
            dtype = self.dtype if weight.is_floating_point() else weight.dtype
            state[name] = copies.setdefault(id(weight), weight.detach().to("cpu", dtype))
        self.network.save_pretrained(out, state_dict=state, max_shard_size=FILE_SIZE)
        config = self.network.config
        before, config.dtype = config.dtype, self.dtype
        config.save_pretrained(out)
        config.dtype = before


def load(settings: PolicySettings) -> FullModel:
    """The model of some settings.

    Raises:
        UserInputError: It cannot be used.
    """
    return FullModel(
        settings.model,
        dtype=settings.dtype,
        seed=settings.seed,
        device=settings.device,
        **settings.pass_options(),
    )


def publish(
    store: ObjectStore, model: FullModel, tokenizer: TokenizerFiles, *, job: str, step: int, base: str
) -> tuple[ModelManifest, str]:
    """Publishes a model with its tokenizer; returns the manifest and the folder's address.

    Args:
        store: The run's storage.
        model: With the weights of the step.
        tokenizer: The base's, with the chat template that the model was trained with.
        job: Name of the run.
        step: Steps done.
        base: Folder or Hugging Face id of the base model.

    Raises:
        StorageError: The store refused.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder)
        model.save(out)
        tokenizer.save_pretrained(out)
        return publish_model(store, out, job=job, step=step, base=base)
