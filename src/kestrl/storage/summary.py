"""`summary.json`: how a run ended, and with which adapter. Written by learner, SFT and bench, read by everything else.

docs/storage.md documents the fields.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from kestrl.errors import StorageError
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.runstate.state import RunState
from kestrl.runstate.states import RunPhase
from kestrl.runstate.versioned import Versioned
from kestrl.storage.layout import SUMMARY
from kestrl.storage.objects import ObjectStore
from kestrl.tools import SandboxInUse

DAMAGED = "summary_damaged"
"""Code of a StorageError: the file is not a summary."""
Means = dict[str, float]
"""Means over the held-out data, by name."""


class SummaryPolicy(BaseModel):
    """The newest version of the policy."""

    model_config = ConfigDict(frozen=True)
    version: str
    """Its name."""
    sha256: str
    """Digest of its weights."""
    uri: str


class SummaryReason(BaseModel):
    """Why something is not as it should be."""

    model_config = ConfigDict(frozen=True)
    reason: str = ""
    """One word, low in cardinality."""
    message: str = ""
    """For people, with what to do."""


class ToolCalls(BaseModel):
    """Tool calls of the scored training episodes that were offered tools."""

    model_config = ConfigDict(frozen=True)
    episodes: int = 0
    calls: int = 0
    calls_per_episode: float = 0.0
    outcomes: dict[str, int] = Field(default_factory=dict[str, int])


class RunSummary(Versioned):
    """The result of a run."""

    NAME: ClassVar[str] = "summary"
    status: RunPhase
    reason: str = ""
    """Why the run did not succeed."""
    steps: int = 0
    total_steps: int = 0
    before: Means | None = None
    after: Means | None = None
    evaluations: tuple[Means, ...] = ()
    """The means of each evaluation, with its `step`."""
    sampling: EvaluationSampling | None = None
    """How the evaluations sampled; None without validation data, and in summaries of earlier versions."""
    policy: SummaryPolicy | None = None
    learned: bool | None = None
    not_learned: SummaryReason | None = None
    learning_warning: str = ""
    """What was lost of what could have been learned; empty otherwise."""
    seconds: float = 0.0
    """Time spent on the run by all its processes."""
    logprob_gap: dict[str, float] = Field(default_factory=dict[str, float])
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Counts by `boundary/code`."""
    skipped_rows: int = 0
    stale: dict[str, Any] = Field(default_factory=dict[str, Any])
    tools: ToolCalls = ToolCalls()
    tool_warning: SummaryReason | None = None
    """What is wrong with the tool calls of the last episodes."""
    sandboxes: dict[str, SandboxInUse] = Field(default_factory=dict[str, SandboxInUse])
    """Sandboxes of tools that run code, by tool, as last reported."""
    state: RunState | None = None
    """The whole state of the run at its end, of which the other fields are parts; None in summaries of earlier
    versions and of `kestrl sft`. A new fact is added to it alone."""


class SFTSummary(RunSummary):
    """The result of supervised fine-tuning."""

    conversations: int = 0
    """Conversations of the training data."""


def write_summary(store: ObjectStore, summary: RunSummary) -> None:
    """Stores the summary.

    Raises:
        StorageError: The store refused.
        PlaceError: The storage is full or not writable.
    """
    store.put(SUMMARY, summary.text().encode())


def read_summary(store: ObjectStore) -> RunSummary | None:
    """The stored summary; None if there is none.

    Raises:
        StorageError: The store refused, or the file is damaged.
        UserInputError: It was written by a later version of KestRL.
    """
    try:
        content = store.get(SUMMARY)
    except StorageError as error:
        if error.code != "not_found":
            raise
        return None
    try:
        return RunSummary.from_json(json.loads(content), store.address(SUMMARY))
    except (ValueError, AttributeError) as error:
        raise StorageError(f"{store.address(SUMMARY)} is not a summary: {error}", code=DAMAGED) from error
