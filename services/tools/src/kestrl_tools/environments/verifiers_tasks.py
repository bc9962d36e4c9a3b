"""Tasks of a task set of verifiers as rows: the task as verifiers' client sends it, and its digest.

Runs in the interpreter of the environment.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


def task_digest(task: Mapping[str, Any]) -> str:
    """SHA-256 of a task, which the host of the environment compares."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def rows(taskset: str, settings: Mapping[str, Any], *, size: int | None) -> Iterator[dict[str, Any]]:
    """A row for each task.

    Args:
        taskset: Its name.
        settings: Its configuration.
        size: Number of tasks; None for all.

    Raises:
        ValueError: There is no such task set, or its settings do not fit, or it has no end and no size is given.
    """
    loaders: Any = import_module("verifiers.v1.utils.loaders")  # of the environment's own interpreter
    try:
        tasks: Any = loaders.load_taskset(
            loaders.taskset_config_type(taskset).model_validate({**settings, "id": taskset})
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{taskset}: {error}") from error
    if size is None and not tasks.bounded:
        raise ValueError(f"{taskset} has no end; give --size")
    first: Iterator[Any] = itertools.islice(tasks, size)
    for index, task in enumerate(first):
        data: dict[str, Any] = task.data.model_dump(mode="json")
        yield {"id": f"{taskset}-{data.get('id') or index}", "task": data, "digest": task_digest(data)}
