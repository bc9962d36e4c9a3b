"""The record of a run: what its checkpoints keep beside weights and optimiser, so that it covers all its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kestrl.errors import UserInputError
from kestrl_learner.learning import LearningCounts
from kestrl_learner.mismatch_stats import MismatchStats
from kestrl_learner.stale import Stale
from kestrl_learner.tool_health import ToolCounts

VERSION = 1
"""Version of the JSON form. A record without one is of version 1. Raise it, and read the versions before, when the
meaning of a field changes; a new field with a default needs no new version."""
Means = dict[str, float]
"""Means over the held-out scenarios, by name."""


class RunRecord(BaseModel):
    """The record of a run up to a step."""

    model_config = ConfigDict(frozen=True)
    version: int = VERSION
    digest: str | None = None
    """`records.identity_digest` of the run; None in records that were written before it was kept."""
    owner: int = 0
    """Fencing token of the learner that wrote it."""
    seconds: float = 0.0
    """Time spent on the run by all its processes."""
    before: Means | None = None
    after: Means | None = None
    evaluations: dict[int, Means] = Field(default_factory=dict[int, Means])
    """Means by step."""
    gap: MismatchStats | None = None
    """Log-prob mismatch to the policies that sampled the tokens."""
    learning: LearningCounts = LearningCounts()
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Failures by `boundary/code`."""
    skipped: tuple[tuple[str, int], ...] = ()
    """Rows whose prompts leave no room in the context, by data set and ordinal."""
    stale: Stale = Field(default_factory=Stale)
    tools: ToolCounts = ToolCounts()
    """Tool calls of all scored training episodes that were offered tools."""

    def but(self, **changes: Any) -> RunRecord:
        """A copy with other values."""
        return self.model_copy(update=changes)

    def with_evaluation(self, step: int, means: Means) -> RunRecord:
        """A copy with the means of one more evaluation."""
        return self.but(evaluations={**self.evaluations, step: means})

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @staticmethod
    def from_json(content: Mapping[str, Any], source: str) -> RunRecord:
        """Reads a record of this version or an earlier one.

        Args:
            content: The JSON form.
            source: Where it was stored, for the error.

        Raises:
            UserInputError: It was written by a later version of KestRL.
            ValueError: It is malformed.
        """
        version = content.get("version", 1)
        if isinstance(version, int) and version > VERSION:
            raise UserInputError(
                f"{source} was written by a later version of KestRL: its run record has version {version}, and this "
                f"KestRL reads up to {VERSION}; resume the run with the later version, or start a new run"
            )
        return RunRecord.model_validate({**content, "version": VERSION})
