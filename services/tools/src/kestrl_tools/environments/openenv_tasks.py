"""Tasks that a server of OpenEnv offers (its Task API) as rows: the arguments of its reset, the task and its digest.

Runs in the interpreter of the environment.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kestrl.tools.shapes import is_list, is_mapping

REQUEST_SECONDS = 60.0
"""Time limit of a request: a server may read its data set first."""
LARGEST_ANSWER = 64 * 2**20
PAGE = 500
"""Tasks of one request."""
MOST_TASKS = 1_000_000
"""Tasks that are listed without a size."""
PREFERRED_SPLIT = "train"
NONE_OFFERED = (404, 405, 501)
"""Statuses of servers without tasks: of older ones, and of environments that are no task providers."""


def task_digest(task: object) -> str:
    """SHA-256 of a task, which the episode compares."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def rows(url: str, *, split: str | None, size: int | None) -> Iterator[dict[str, Any]]:
    """A row for each task of a split.

    Args:
        url: URL of the server.
        split: Name of the split; None for `train`, or the only one.
        size: Number of tasks, the first ones; None for all.

    Raises:
        ValueError: The server offers no tasks, or not this split.
    """
    server = _server(url)
    name = _split([str(split_record["name"]) for split_record in _asked(server, "splits")], split)
    total = int(_asked(server, "num_tasks", {"split": name})["num_tasks"])
    if size is None and total > MOST_TASKS:
        raise ValueError(f"split {name} has {total} tasks; give --size")
    stop = total if size is None else min(size, total)
    for start in range(0, stop, PAGE):
        end = min(start + PAGE, stop)
        page = {"split": name, "start": start, "stop": end}
        tasks = _asked(server, "task_range", page)["tasks"]
        if not is_list(tasks) or len(tasks) != end - start:
            raise ValueError(f"split {name}: it gave {len(tasks)} tasks from {start} on, and {page} were asked for")
        for index, task in enumerate(tasks, start):
            reset = {"split": name, "index": index}
            yield {"id": f"{name}-{index}", "reset": reset, "task": task, "digest": task_digest(task)}


def task(url: str, split: str, index: int) -> object:
    """A task of a server. Raises ValueError."""
    return _asked(_server(url), "task", {"split": split, "index": index})["task"]


def _server(url: str) -> str:
    """Base URL of the Task API of the server's environment."""
    base = url.rstrip("/")
    (name, *_) = _asked(base, "list_environments")
    return f"{base}/{urllib.parse.quote(str(name))}"


def _split(offered: Sequence[str], name: str | None) -> str:
    names = ", ".join(offered) or "none"
    if name is not None:
        if name not in offered:
            raise ValueError(f"has no split {name}; its splits: {names}")
        return name
    if PREFERRED_SPLIT in offered:
        return PREFERRED_SPLIT
    if len(offered) != 1:
        raise ValueError(f"has no split {PREFERRED_SPLIT}; give --split, one of: {names}")
    return offered[0]


def _asked(base: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
    """The answer of a route."""
    request = urllib.request.Request(  # noqa: S310 - http(s), as the manifest's URL is
        f"{base}/{route}",
        None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310 - as above
            content: object = json.loads(answer.read(LARGEST_ANSWER))
    except urllib.error.HTTPError as error:
        if error.code in NONE_OFFERED:
            raise ValueError(
                "the server offers no tasks: its environment has no list_splits, num_tasks and get_task_range; write "
                'rows yourself, with the arguments of its reset: {"reset": {"seed": 7}}'
            ) from error
        detail = error.read(2000).decode(errors="replace")
        raise ValueError(f"{base}/{route} answered with status {error.code}: {detail}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{base}/{route} does not answer as OpenEnv's does: {error}") from error
    if not is_list(content) and not is_mapping(content):
        raise ValueError(f"{base}/{route} does not answer as OpenEnv's does")
    return content
