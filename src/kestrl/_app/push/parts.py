"""The parts of a run that are sent, each an object of its storage, in the order of sending."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from kestrl.episode import Purpose
from kestrl.errors import StorageError
from kestrl.storage import ObjectStore, layout
from kestrl.storage.objects import ObjectVersion

DAMAGED = "metrics_damaged"
"""Code of a StorageError: a file is no record of metrics."""


class PartKind(IntEnum):
    """Kinds of parts, in the order of sending within a step."""

    EVALUATION = 0
    METRICS = 1
    EPISODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """An object of a run that is sent."""

    kind: PartKind
    purpose: Purpose
    step: int
    path: str
    version: ObjectVersion


def parts_of(store: ObjectStore) -> Sequence[RunPart]:
    """The parts that a run has stored.

    Raises:
        StorageError: The store refused.
    """
    stored = {**store.versions(layout.METRICS), **{
        path: version
        for purpose in Purpose
        for path, version in store.versions(layout.episodes_folder(purpose)).items()
    }}  # fmt: skip
    parts = [part for path, version in stored.items() if (part := _part(path, version)) is not None]
    return sorted(parts, key=lambda part: (part.step, part.kind, part.purpose))


def _part(path: str, version: ObjectVersion) -> RunPart | None:
    if metrics := layout.metrics_step(path):
        purpose, step = metrics
        kind = PartKind.EVALUATION if purpose is Purpose.EVALUATION else PartKind.METRICS
        return RunPart(kind=kind, purpose=purpose, step=step, path=path, version=version)
    step_of_batch = layout.episode_step(path)
    if step_of_batch is None:
        return None
    purpose = layout.episode_purpose(path)
    return RunPart(kind=PartKind.EPISODES, purpose=purpose, step=step_of_batch, path=path, version=version)


def record_of(store: ObjectStore, path: str) -> Mapping[str, Any]:
    """A stored record of metrics.

    Raises:
        StorageError: The store refused, or the file is damaged.
    """
    try:
        record: Any = json.loads(store.get(path))
    except ValueError as error:
        raise StorageError(f"{store.address(path)} is no record: {error}; remove it", code=DAMAGED) from error
    if not isinstance(record, dict):
        raise StorageError(f"{store.address(path)} is no record; remove it", code=DAMAGED)
    return cast("dict[str, Any]", record)
