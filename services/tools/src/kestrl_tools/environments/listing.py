"""`python -m kestrl_tools.environments.listing --out FILE`: lists tasks as rows.

Runs in the interpreter of the environment. Its standard input is a JSON object: settings and size, with the generator
of reasoning-gym, its seed and whether solved conversations are listed; or the task set of verifiers; or the server of
OpenEnv and its split.
What is wrong with it is one line on the standard error, with exit status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kestrl.errors import UserInputError
from kestrl_tools.environments import openenv_tasks, reasoning_gym, verifiers_tasks
from kestrl_tools.environments.openenv import OpenEnv


def main() -> int:
    """Writes one row a line; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    request = json.load(sys.stdin)
    try:
        rows = list(_rows(request))
    except (ValueError, TypeError, UserInputError) as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)  # noqa: T201 - read by the command
        return 2
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return 0


def _rows(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "openenv" in request:
        return _of_server(**request["openenv"], split=request["split"], size=request["size"])
    settings, size = request["settings"], request["size"]
    if "taskset" in request:
        return verifiers_tasks.rows(request["taskset"], settings, size=size)
    listed = reasoning_gym.transcripts if request["transcripts"] else reasoning_gym.rows
    return listed(request["generator"], settings, seed=request["seed"], size=size)


def _of_server(url: str | None, app: str | None, *, split: str | None, size: int | None) -> Iterator[dict[str, Any]]:
    """Tasks of a running server, or of one that runs as long as it lists them."""
    OpenEnv.start_service(url, app)
    try:
        yield from openenv_tasks.rows(OpenEnv.address(), split=split, size=size)
    finally:
        OpenEnv.stop_service()


if __name__ == "__main__":
    sys.exit(main())
