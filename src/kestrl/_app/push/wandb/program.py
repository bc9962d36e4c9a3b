"""The program that writes a run with the package `wandb`. It runs in another environment: the standard library alone.

Reads one JSON object a line from its input and answers each with a line, `ok` or `error: ...`, when `wandb` has taken
it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import wandb  # type: ignore[import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]

STEP = "kestrl/step"
wandb_module: Any = wandb


class Writer:
    """Writes to one run."""

    def __init__(self) -> None:
        self._run: Any = None

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message."""
        kind = message.pop("kind")
        getattr(self, f"_{kind}")(**message)

    def _start(self, *, id: str, name: str, project: str, folder: str, config: dict[str, Any]) -> None:  # noqa: A002
        self._run = wandb_module.init(id=id, name=name, project=project, dir=folder, config=config, resume="allow")
        # The order of `wandb.log` is no step: what is sent again, or late, keeps its own.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def _numbers(self, *, step: int, numbers: dict[str, float]) -> None:
        self._run.log({STEP: step, **numbers})

    def _table(self, *, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({STEP: step, name: wandb_module.Table(columns=columns, data=rows)})

    def _finish(self, *, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)

    def _close(self, *, code: int) -> None:
        self._run.finish(exit_code=code)


def main() -> None:
    """Takes messages until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what `wandb` prints is no answer
    writer = Writer()
    for line in sys.stdin:
        try:
            writer.take(json.loads(line))
        except Exception as error:  # noqa: BLE001 - `wandb` raises anything; the reader of the answer decides
            print(f"error: {type(error).__name__}: {error}".replace("\n", " "), file=answers, flush=True)
        else:
            print("ok", file=answers, flush=True)


if __name__ == "__main__":
    main()
