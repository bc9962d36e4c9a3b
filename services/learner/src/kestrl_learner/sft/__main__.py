"""`python -m kestrl_learner.sft --settings FILE`: the program behind `kestrl sft`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl._shared.log_lines import start_log
from kestrl._shared.plan.settings.common import read_settings
from kestrl._shared.plan.sft import SFTSettings
from kestrl.errors import KestrlError, StorageInaccessible, UserInputError
from kestrl_learner.sft.training import SFTRun

EXIT_STOPPED = 128 + signal.SIGINT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--result", type=Path, help="file for version, sha256 and uri of the adapter or model, as JSON")
    arguments = parser.parse_args()
    start_log("%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bar()  # of transformers, which is drawn into the lines of the steps
    stop_signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: stop_signals.append(which))
    try:
        settings = read_settings(SFTSettings, arguments.settings)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        published = SFTRun(settings, stopping=lambda: bool(stop_signals)).run()
        if published is not None and arguments.result is not None:
            arguments.result.write_text(published.model_dump_json(), encoding="utf-8")
    except StorageInaccessible as error:  # another pod may find it healed
        return _end(f"error: {error}", EXIT_FAILED)
    except UserInputError as error:
        return _end(f"error: {error}", EXIT_INPUT)
    except KestrlError as error:
        return _end(f"error: {error.failure()}", EXIT_FAILED)
    if published is None:
        return _end("stopped after a checkpoint; the same command goes on from it", EXIT_STOPPED)
    print(published.uri)  # noqa: T201 - the result of the program
    return 0


def _end(message: str, code: int) -> int:
    print(message, file=sys.stderr)  # noqa: T201 - for the person who started it
    return code


if __name__ == "__main__":
    sys.exit(main())
