"""The end of a run: what it came to, in `summary.json` and for the metric sinks."""

from __future__ import annotations

import asyncio
import logging

from kestrl.errors import PlaceError, StorageError
from kestrl.runstate.states import RunPhase
from kestrl.storage.summary import RunSummary, write_summary
from kestrl_learner.ledger import Superseded
from kestrl_learner.store.metric_sinks import MetricSinks
from kestrl_learner.store.runstore import RunStore

log = logging.getLogger(__name__)


async def end_run(store: RunStore, sinks: MetricSinks, summary: RunSummary) -> None:
    """Writes `summary.json` and ends the metric sinks with it.

    If it cannot be written, the error is raised unless the run has failed itself.
    """
    try:
        await asyncio.to_thread(write_summary, store, summary)
    except Superseded:
        log.warning("the summary is not written: another learner owns the run")
    except (StorageError, PlaceError) as error:
        log.error("the summary cannot be written: %s", error)
        if summary.status is not RunPhase.FAILED:
            raise
    await asyncio.to_thread(sinks.finish, summary)
