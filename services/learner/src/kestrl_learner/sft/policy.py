"""The model that supervised fine-tuning begins with, and the adapter or model that it publishes."""

from __future__ import annotations

from kestrl._shared.plan.sft import SFTSettings
from kestrl.runstate.states import RunPhase
from kestrl.storage import ObjectStore, adapter_folders
from kestrl.storage.models import model_folders
from kestrl.storage.summary import SummaryPolicy, read_summary
from kestrl_learner.model import adapters, full_model
from kestrl_learner.model.adapters import AdapterSource
from kestrl_learner.model.full_model import FullModel
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.model.tokenizer_files import TokenizerFiles
from kestrl_learner.store.records import summary_policy
from kestrl_learner.store.runstore import RunStore


def load_model(settings: SFTSettings) -> PolicyModel | FullModel:
    """The model that a run begins with.

    Raises:
        UserInputError: The base or the adapter cannot be used.
        StorageError: The adapter is corrupt.
    """
    if settings.parameters == "adapter":
        return adapters.load_policy(settings)
    return full_model.load(settings)


def publish_policy(
    store: RunStore, model: AdapterSource | FullModel, tokenizer: TokenizerFiles, settings: SFTSettings, step: int
) -> SummaryPolicy:
    """Publishes the adapter or the model of a step.

    Raises:
        StorageError: The store refused.
    """
    if isinstance(model, FullModel):
        files, folder = full_model.publish(store, model, tokenizer, job=settings.job, step=step, base=settings.model)
        return summary_policy(files.policy, folder)
    manifest, address = adapters.publish(store, model, job=settings.job, step=step, base=settings.model, parent=None)
    return summary_policy(manifest.policy, address)


def published_policy(store: ObjectStore) -> SummaryPolicy | None:
    """What a run that has succeeded published; None for another run, or where it is gone.

    Raises:
        StorageError: The store refused, or a file is damaged.
    """
    summary = read_summary(store)
    if summary is None or summary.status != RunPhase.SUCCEEDED or summary.policy is None:
        return None
    folders = (*adapter_folders(store), *model_folders(store))
    return summary.policy if summary.policy.uri in map(store.address, folders) else None
