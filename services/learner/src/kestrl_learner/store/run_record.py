"""The record of a run: what its checkpoints keep beside weights and optimiser, so that it covers all its processes."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from kestrl.runstate.versioned import Versioned
from kestrl.storage.summary import Means
from kestrl_learner.progress.learning import LearningCounts
from kestrl_learner.progress.stale import Stale
from kestrl_learner.progress.tool_health import ToolCounts
from kestrl_learner.train.mismatch_stats import MismatchStats


class RunRecord(Versioned):
    """The record of a run up to a step."""

    NAME: ClassVar[str] = "run record"
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
