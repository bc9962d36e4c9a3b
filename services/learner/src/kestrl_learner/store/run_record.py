"""The record of a run: what its checkpoints keep beside weights and optimiser, so that it covers all its processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from kestrl.runstate.history import History, Means
from kestrl.runstate.versioned import Versioned


class RunRecord(Versioned, History):
    """The history of a run up to a step, and whose it is."""

    NAME: ClassVar[str] = "run record"
    digest: str | None = None
    """`records.identity_digest` of the run; None in records that were written before it was kept."""
    owner: int = 0
    """Fencing token of the learner that wrote it."""
    seconds: float = 0.0
    """Time spent on the run by all its processes."""
    skipped: tuple[tuple[str, int], ...] = ()
    """Rows whose prompts leave no room in the context, by data set and ordinal."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a record; earlier versions of KestRL wrote no `skipped_rows`."""
        return super().from_json({"skipped_rows": len(content.get("skipped", ())), **content}, source)

    @classmethod
    def of(
        cls, history: History, *, digest: str | None, owner: int, seconds: float, skipped: Iterable[tuple[str, int]]
    ) -> Self:
        """The record with a history."""
        counts = {name: getattr(history, name) for name in History.model_fields}
        return cls(**counts, digest=digest, owner=owner, seconds=seconds, skipped=tuple(sorted(skipped)))

    @property
    def history(self) -> History:
        """The counts alone."""
        return History(**{name: getattr(self, name) for name in History.model_fields})

    def with_evaluation(self, step: int, means: Means) -> Self:
        """A copy with the means of one more evaluation."""
        return self.but(evaluations={**self.evaluations, step: means})
