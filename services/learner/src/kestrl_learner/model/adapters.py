"""The adapter as files: one safetensors file, peft's configuration, and the manifest with its probe."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from peft import LoraConfig
from safetensors.torch import load, save
from torch import Tensor

from kestrl._shared.plan.settings.learner import PolicySettings
from kestrl.errors import UserInputError
from kestrl.storage import (
    AdapterManifest,
    ObjectStore,
    Probe,
    adapter_folder,
    fetch_adapter,
    open_store,
    publish_adapter,
    read_manifest,
)
from kestrl.storage.adapters import WEIGHTS
from kestrl.storage.files import digest
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.ranks.group import RankGroup

PROBE_TOKENS = 16
"""Length of the probe. 24 tokens hardly distinguish versions better and take longer (docs/performance.md)."""
PROBE_RANGE = (32, 232)
"""Range of the probe's token ids: low ids are ordinary tokens in every known tokenizer."""


def probe_ids(vocabulary: int) -> tuple[int, ...]:
    """A fixed sequence of ordinary tokens, unlikely on purpose, so that small differences of weights change its
    log-probs.

    The tokens differ: every model predicts a repeated token with certainty, whatever its adapter.
    """
    low, high = PROBE_RANGE if vocabulary > PROBE_RANGE[1] else (1, vocabulary)
    draw = random.Random(20_240_229)  # noqa: S311 - fixed on purpose
    return tuple(draw.randrange(low, high) for _ in range(PROBE_TOKENS))


class AdapterSource(Protocol):
    """What publishing needs of the model; see `PolicyModel`."""

    @property
    def config(self) -> LoraConfig: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def targets(self) -> tuple[str, ...]: ...

    def adapter_state(self) -> dict[str, Tensor]: ...

    def score(self, token_ids: Sequence[int], *, adapter: bool) -> list[float]: ...


def adapter_files(model: AdapterSource, path: str) -> dict[str, bytes]:
    """The files an engine loads."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": path,
        "r": model.config.r,
        "lora_alpha": model.config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(model.targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    return {WEIGHTS: save(model.adapter_state()), "adapter_config.json": json.dumps(config, indent=2).encode()}


def publish(
    store: ObjectStore, model: AdapterSource, *, job: str, step: int, base: str, parent: str | None
) -> tuple[AdapterManifest, str]:
    """Publishes the model's adapter as version `step`; returns the stored manifest and the folder's address.

    Raises:
        StorageError: The store refused.
    """
    files = adapter_files(model, base)
    ids = probe_ids(model.vocabulary)
    manifest = AdapterManifest(
        job=job,
        step=step,
        sha256=digest(files[WEIGHTS]),
        files={name: digest(content) for name, content in files.items()},
        base_model=base,
        rank=model.config.r,
        alpha=float(model.config.lora_alpha),
        targets=model.targets,
        parent=parent,
        probe=Probe(
            token_ids=ids,
            logprobs=tuple(model.score(ids, adapter=True)),
            base_logprobs=tuple(model.score(ids, adapter=False)),
        ),
    )
    uri = publish_adapter(store, files, manifest)
    # A resumed run publishes its version again: the parent is in the manifest written the first time.
    if parent is None and step > 0:
        manifest = read_manifest(store, adapter_folder(manifest.policy))
    return manifest, uri


def load_policy(settings: PolicySettings, group: RankGroup | None = None) -> PolicyModel:
    """The model that a run begins with: the base with a new adapter, or with the published one it starts from.

    Args:
        settings: Of the model.
        group: The ranks over which the base is sharded; every rank must call this.

    Raises:
        UserInputError: The base or the adapter cannot be used.
        StorageError: The adapter is corrupt.
    """
    model = PolicyModel(
        settings.model,
        dtype=settings.dtype,
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        seed=settings.seed,
        device=settings.device if group is None else str(group.device),
        **settings.pass_options(),
        group=group,
    )
    if settings.adapter_from is not None:
        load_from(model, settings.adapter_from)
    return model


def load_from(model: PolicyModel, address: str) -> None:
    """Replaces the model's adapter by a published one, verified by its digests.

    Raises:
        UserInputError: There is none, or it has another shape.
        StorageError: It is corrupt.
    """
    with TemporaryDirectory() as folder:
        manifest = fetch_adapter(open_store(address, create=False), Path(folder) / "adapter")
        weights = load((Path(folder) / "adapter" / WEIGHTS).read_bytes())
    adapter_shape = (manifest.rank, manifest.alpha, {name: weight.shape for name, weight in weights.items()})
    model_shape = (
        model.config.r,
        float(model.config.lora_alpha),
        {name: weight.shape for name, weight in model.adapter_state().items()},
    )
    if adapter_shape != model_shape:
        raise UserInputError(
            f"spec.model.adapter.from: {address} has rank {manifest.rank}, alpha {manifest.alpha:g} and targets "
            f"{', '.join(manifest.targets)}; give the job the same, and its base model"
        )
    model.load_adapter_state(weights)
