"""The steps of a run as points of curves, and the rows of one step."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean
from threading import Lock
from typing import Any, cast

from kestrl._app.episodes.reading import Batch, batch_table
from kestrl.episode import Purpose
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import TRAINED_OUTCOMES
from kestrl.storage.layout import episode_batch, episodes_folder

STEP_COLUMNS = (
    "group", "group_index", "scenario", "episode", "outcome", "reason", "reward", "failure_boundary", "failure_code",
    "failure_message", "stop", "num_turns", "num_tool_calls", "policy", "engine", "scoring",
)  # fmt: skip
"""Columns of the table that the page of a step needs."""
RULER = "ruler"
"""Component of the reward that stores each of its scores."""
POINT_COLUMNS = ("reward", "failure_boundary", "episode", "outcome", "policy_step")
MOST_POINTS = 10_000
"""Points that are kept between requests."""
READERS = 8
"""Files that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A stored step as a point of the curves."""

    batch: Batch
    reward: float | None
    """Mean of the scored episodes; None if there is none."""
    episodes: int
    failures: Mapping[str, int]
    """Failed episodes and groups by boundary."""
    staleness: int | None = None
    """Age of the oldest policy that an episode of the step began with, in steps; None of an evaluation."""
    problem: str = ""
    """Why the step cannot be read."""


def point_of(batch: Batch, columns: Mapping[str, Sequence[Any]]) -> StepPoint:
    """The point of a step from its columns."""
    rewards = [reward for reward in columns["reward"] if reward is not None]
    ages = [
        batch.step - 1 - policy
        for policy, outcome in zip(columns["policy_step"], columns["outcome"], strict=True)
        if policy is not None and outcome in TRAINED_OUTCOMES
    ]
    return StepPoint(
        batch=batch,
        staleness=max(ages, default=None),
        reward=fmean(rewards) if rewards else None,
        episodes=sum(name is not None for name in columns["episode"]),
        failures=Counter(boundary for boundary in columns["failure_boundary"] if boundary is not None),
    )


class Points:
    """Points of steps, kept between requests. A file that was written again is read again: a resumed run does so with
    its last steps.
    """

    def __init__(self) -> None:
        self._points: OrderedDict[tuple[str, Batch, str], StepPoint] = OrderedDict()
        self._lock = Lock()

    def of(self, store: ObjectStore, batches: Sequence[Batch]) -> Sequence[StepPoint]:
        """The points of steps, in their order. A step that cannot be read is a point with its problem."""
        tags = _tags(store, {batch.purpose for batch in batches})
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self._point, repeat(store), batches, repeat(tags)))

    def _point(self, store: ObjectStore, batch: Batch, tags: Mapping[str, str]) -> StepPoint:
        # The tag is from before the read: a point of a file that is written meanwhile is read again.
        key = (store.uri, batch, tags.get(episode_batch(*batch), ""))
        with self._lock:
            cached = self._points.get(key)
        try:
            return cached or self._keep(key, point_of(batch, batch_table(store, batch, POINT_COLUMNS).to_pydict()))
        except (StorageError, UserInputError) as error:
            return StepPoint(batch=batch, reward=None, episodes=0, failures={}, problem=str(error))

    def _keep(self, key: tuple[str, Batch, str], point: StepPoint) -> StepPoint:
        with self._lock:
            self._points[key] = point
            while len(self._points) > MOST_POINTS:
                self._points.popitem(last=False)
        return point


def _tags(store: ObjectStore, purposes: Iterable[Purpose]) -> Mapping[str, str]:
    """Version of each step's file by path; none of what KestRL 0.1 stored."""
    return {
        path: version.tag for purpose in purposes for path, version in store.versions(episodes_folder(purpose)).items()
    }


def step_rows(store: ObjectStore, batch: Batch, *, tokens: bool = False) -> Sequence[dict[str, Any]]:
    """The rows of a step, with how far a ruler's scores of each episode differ, and, if its tokens are read, with its
    log-prob gap in nats a token.
    """
    columns = [*STEP_COLUMNS, *(("rows",) if tokens else ())]
    rows: list[dict[str, Any]] = batch_table(store, batch, columns).to_pylist()
    return [
        {**row, "gap": episode_gap(row.pop("rows", None) or ()), "disagreement": disagreement(row.pop("scoring"))}
        for row in rows
    ]


def disagreement(scoring: str | None) -> float | None:
    """Distance of the largest to the smallest score that a ruler gave an episode; None if it gave fewer than two."""
    details: Any = json.loads(scoring) if scoring else {}
    ruler = details.get(RULER)
    scores: Sequence[float] = cast("dict[str, Any]", ruler).get("scores", ()) if isinstance(ruler, dict) else ()
    return max(scores) - min(scores) if len(scores) > 1 else None


def episode_gap(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean distance of the learner's log-probs to the engine's; None of an episode that was not trained on."""
    gaps = [
        abs(learner - behaviour)
        for row in rows
        if row["learner_logprobs"] is not None
        for sampled, learner, behaviour in zip(row["mask"], row["learner_logprobs"], row["logprobs"], strict=True)
        if sampled
    ]
    return fmean(gaps) if gaps else None
