"""The controller of SFTJobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import BATCH_JOB, KUEUE_WORKLOAD, SFT_JOB, Kind
from kestrl_operator.config import OperatorConfig
from kestrl_operator.controllers.controller import Controller
from kestrl_operator.controllers.installations import ClaimedJobs, Installations
from kestrl_operator.controllers.sft_reconcile import SFTReconciler, list_sft
from kestrl_operator.events import Events
from kestrl_operator.state.accelerators import Node
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.sft import SFTStore
from kestrl_operator.work.work_record import WorkRecord

WORKERS = 2
"""SFTJobs that are reconciled concurrently."""
WATCHED = frozenset({SFT_JOB, BATCH_JOB})
"""What no other controller watches."""


def sft_controller(
    api: Api,
    events: Events,
    config: OperatorConfig,
    installations: Installations,
    work_record: WorkRecord,
    nodes: Callable[[], Sequence[Node] | None],
) -> Controller:
    """The controller of SFTJobs.

    Args:
        api: The API server.
        events: Writes events.
        config: The operator's configuration.
        installations: Which jobs are this installation's.
        work_record: Notes the job of a pass.
        nodes: The nodes as last listed; None where this operator may not list them.
    """
    store = SFTStore()

    def take(kind: Kind, body: Mapping[str, Any], deleted: bool) -> Key | None:
        if kind == KUEUE_WORKLOAD:
            return store.workload(body, deleted=deleted)
        return store.job(body, deleted=deleted) if kind == SFT_JOB else store.batch(body, deleted=deleted)

    reconciler = SFTReconciler(api, store, events, config.jobs, work_record, nodes, kueue=config.kueue)
    return Controller(
        kind=SFT_JOB,
        watched=WATCHED | {KUEUE_WORKLOAD},
        store=store,
        take=take,
        reconciler=ClaimedJobs(installations, SFT_JOB, store, reconciler),
        workers=WORKERS,
        list_missed=partial(list_sft, api, store, config.namespaces, kueue=config.kueue),
    )
