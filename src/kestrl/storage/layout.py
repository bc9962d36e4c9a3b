"""Paths of what a run stores, relative to its storage; docs/storage.md says what lies there. Pure."""

from __future__ import annotations

import re

from kestrl.episode import PolicyVersion, Purpose

SUMMARY = "summary.json"
TOOLS = "tools.json"
"""SHA-256 of what each tool server listed at the start of the run, by its name."""
ADAPTERS = "adapters"
MODELS = "models"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
"""Written after every other file of its folder: a folder without one is incomplete and is not read."""

_EPISODES = {Purpose.TRAIN: "episodes/train", Purpose.EVALUATION: "episodes/eval"}
_BATCH = re.compile(r"episodes/(?:train|eval)/step=(?P<step>\d+)\.parquet")
_OLD_BATCH = re.compile(r"episodes/(?P<purpose>train|eval)/(?P<done>\d+)\.pb")
METRICS = "metrics"
LABELS = "episodes/labels"
_METRICS = re.compile(r"metrics/(?P<eval>eval/)?(?P<step>\d+)\.json")
_ADAPTER = re.compile(r"adapters/(?P<step>\d+)-(?P<digest>[0-9a-f]+)")
_CHECKPOINT_MANIFEST = re.compile(r"checkpoints/(?P<step>\d+)/manifest\.json")


def step_metrics(step: int) -> str:
    """Record of an optimiser step; the first is 1."""
    return f"metrics/{step:06d}.json"


def evaluation_metrics(step: int) -> str:
    """Means of the evaluation after a step; 0 is before training."""
    return f"metrics/eval/{step:06d}.json"


def metrics_step(path: str) -> tuple[Purpose, int] | None:
    """Purpose and step of the metrics at a path; None for other files."""
    if parts := _METRICS.fullmatch(path):
        return (Purpose.EVALUATION if parts["eval"] else Purpose.TRAIN, int(parts["step"]))
    return None


def episodes_folder(purpose: Purpose) -> str:
    return _EPISODES[purpose]


def episode_batch(purpose: Purpose, step: int) -> str:
    """Groups of an optimiser step, of which the first is 1, or of the evaluation after so many steps."""
    return f"{_EPISODES[purpose]}/step={step:06d}.parquet"


def old_episode_batch(purpose: Purpose, step: int) -> str:
    """The same in runs of KestRL 0.1, as protobuf: its training steps are numbered from 0."""
    return f"{_EPISODES[purpose]}/{step - (purpose is Purpose.TRAIN):06d}.pb"


def episode_step(path: str) -> int | None:
    """Step of the batch at a path; None for other files."""
    if parts := _BATCH.fullmatch(path):
        return int(parts["step"])
    if parts := _OLD_BATCH.fullmatch(path):
        return int(parts["done"]) + (parts["purpose"] == "train")
    return None


def episode_purpose(path: str) -> Purpose:
    """Purpose of the batch at a path."""
    return next(purpose for purpose, folder in _EPISODES.items() if path.startswith(f"{folder}/"))


def episode_label(digest: str) -> str:
    """A person's label of the episode whose id has this digest."""
    return f"{LABELS}/{digest}.parquet"


def adapter_folder(policy: PolicyVersion) -> str:
    """Folder of a version; unique, since it contains the digest."""
    return f"{ADAPTERS}/{policy.step:06d}-{policy.sha256[:12]}"


def model_folder(policy: PolicyVersion) -> str:
    """Folder of a model of which all parameters were trained; unique, since it contains the digest."""
    return f"{MODELS}/{policy.step:06d}-{policy.sha256[:12]}"


def adapter_version(folder: str) -> tuple[int, str] | None:
    """Step and start of the digest of the version in a folder; None for other folders."""
    match = _ADAPTER.fullmatch(folder)
    return None if match is None else (int(match["step"]), match["digest"])


def checkpoint_folder(step: int) -> str:
    return f"{CHECKPOINTS}/{step:06d}"


def checkpoint_manifest(step: int) -> str:
    return f"{checkpoint_folder(step)}/{MANIFEST}"


def checkpoint_state(step: int, sha256: str) -> str:
    """State of a checkpoint. Its name holds its digest, so that writing a step again overwrites no state in use."""
    return f"{checkpoint_folder(step)}/{sha256[:16]}.pt"


def checkpoint_step(path: str) -> int | None:
    """Step of the checkpoint whose manifest is at a path; None for other files."""
    match = _CHECKPOINT_MANIFEST.fullmatch(path)
    return None if match is None else int(match["step"])
