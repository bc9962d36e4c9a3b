"""Data sets of a run: the scenarios it trains on and those it is evaluated on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kestrl.data import load_scenarios
from kestrl.data.shared_tasks import shared_tasks
from kestrl.episode import Scenario

if TYPE_CHECKING:
    from kestrl._shared.plan.settings.common import DataSettings
    from kestrl._shared.plan.settings.learner import LearnerSettings

log = logging.getLogger(__name__)


class DataSets(NamedTuple):
    """Scenarios of a run."""

    training: Sequence[Scenario]
    held_out: Sequence[Scenario]
    """Empty for a job without validation data."""
    report: str
    """What is to be said of tasks of both; empty if there are none, or if the manifest names one data set twice."""


def read_data_sets(settings: LearnerSettings) -> DataSets:
    """Reads the data of a run; tasks of both data sets have a line in the log.

    Raises:
        UserInputError: A row is invalid, or names a loop in a job whose agent is outside of the worker.
    """
    training = _scenarios(settings.data)
    held_out = [] if settings.validation is None else _scenarios(settings.validation)
    shared = shared_tasks(training, held_out) if settings.held_out_apart else None
    if shared is None:
        return DataSets(training, held_out, "")
    message = shared.message(len(held_out), repr(shared.held_out.id), repr(shared.training.id))
    log.warning("%s", message)
    return DataSets(training, held_out, message)


def _scenarios(data: DataSettings) -> list[Scenario]:
    return load_scenarios(
        Path(data.path), size=data.size, promptless=data.promptless, runner=data.runner, loops=data.loops
    )
