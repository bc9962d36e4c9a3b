"""Common part of every service's `main`: parses `--settings`, sets up logs, telemetry and the import path."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from asyncio.tasks import _unregister_task as unregister_task  # pyright: ignore[reportPrivateUsage] - documented: "Extending asyncio"
from collections.abc import Awaitable, Callable
from pathlib import Path

from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl._shared.credentials import require
from kestrl._shared.log_lines import environment_redactor, set_level, start_log
from kestrl._shared.plan.settings.common import Settings
from kestrl._shared.processes.stopping import leave
from kestrl._shared.telemetry import set_up
from kestrl.errors import KestrlError, UserInputError, place_error

log = logging.getLogger(__name__)
END_SECONDS = 5.0
"""Maximum seconds for cancelled tasks to end when the program ends."""
YOUNG_OBJECTS = 20_000
"""Threshold of the youngest generation in `collect_rarely`; with Python's default of 700 the collector runs every few
episodes."""


def run_service(
    settings_type: type[Settings], work: Callable[[Settings], Awaitable[None]], *, uvloop: bool = True
) -> int:
    """Runs a service to its end and returns the process's exit code, as `exit_code` does."""
    path = settings_path()

    def run() -> None:
        start_log()
        settings = settings_type.read(path)
        role = settings.component.partition("-")[0]
        require(role)
        set_level(f"kestrl_{role}")
        sys.path[:0] = settings.python_path
        set_up(
            settings.component,
            job=settings.job,
            run=settings.run,
            endpoint=settings.otlp_endpoint,
            traced_groups=settings.traced_groups,
            metrics_listen=settings.metrics_listen,
        )
        if uvloop:
            import uvloop as fast

            fast.run(_finish(work(settings)))
        else:
            asyncio.run(_finish(work(settings)))

    return leave(exit_code(run))


def collect_rarely() -> None:
    """Reduces garbage collection after startup: existing objects are frozen, and collections are rare.

    Not suitable if cycles may hold large resources, such as tensors or files.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def settings_path() -> Path:
    """Parses the command line of every service: `--settings FILE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True, help="JSON file written from the plan")
    return Path(parser.parse_args().settings)


def exit_code(run: Callable[[], None]) -> int:
    """Runs a program to its end and returns the process's exit code.

    A `UserInputError` is printed as one line `error: ...` with exit code 2, any other `KestrlError` with code 1;
    neither shows a traceback. Any other exception is a bug and is printed with a traceback.
    """
    try:
        run()
    except UserInputError as error:
        return _end(str(error), EXIT_INPUT)
    except KestrlError as error:
        return _end(str(error.failure()), EXIT_FAILED)
    except OSError as error:
        unusable = place_error(error, str(error.filename or "a file"))
        if unusable is None:
            raise
        return _end(str(unusable), EXIT_INPUT)
    return 0


def _end(message: str, code: int) -> int:
    print(f"error: {environment_redactor().text(message)}", file=sys.stderr)  # noqa: T201 - the last line a person reads
    return code


async def _finish(work: Awaitable[None]) -> None:
    try:
        await work
    finally:
        await _end_tasks()


async def _end_tasks() -> None:
    """Cancels remaining tasks, with a time limit: a user's task may ignore its cancellation."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=END_SECONDS)
    for task in tasks:
        log.error("the task %s ignores its cancellation and is abandoned", task.get_name())
        unregister_task(task)
