"""What the page of a run shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kestrl._app.episodes.reading import Batch
from kestrl._app.page.charts import Curve, bars, curve
from kestrl._app.page.steps import Points, StepPoint
from kestrl.episode import Purpose
from kestrl.runstate.stored import finished_steps, measured_gaps, read_events
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import ObjectEpisodeStore

SHOWN_STEPS = 200
"""Training steps of a page; earlier ones have a page of their own."""


def run_facts(store: ObjectStore, points: Points, until: int | None) -> dict[str, Any]:
    """Curves and steps of a run.

    Args:
        store: The run's storage.
        points: The points known.
        until: The last step to show; None for the newest.
    """
    stored = ObjectEpisodeStore(store)
    steps = [step for step in stored.steps(Purpose.TRAIN) if until is None or step <= until]
    newest_steps = steps[-SHOWN_STEPS:]
    held_out = stored.steps(Purpose.EVALUATION)
    if newest_steps:
        first = 0 if len(steps) == len(newest_steps) else newest_steps[0]
        held_out = [step for step in held_out if first <= step <= newest_steps[-1]]
    trained = points.of(store, [Batch(Purpose.TRAIN, step) for step in newest_steps])
    evaluated = points.of(store, [Batch(Purpose.EVALUATION, step) for step in held_out[-SHOWN_STEPS:]])
    every = [point.batch.step for point in (*trained, *evaluated)] or [0]
    span = (min(every), max(every))
    return {
        "span": span,
        "reward": curve(_rewards(trained), span),
        "held_out": curve(_rewards(evaluated), span),
        "staleness": curve(
            {point.batch.step: point.staleness for point in trained if point.staleness is not None}, span
        ),
        **_event_curves(store, span),
        "failures": bars({point.batch.step: point.failures for point in trained}, span),
        "most_failures": max((sum(point.failures.values()) for point in trained), default=0),
        "boundaries": sum((Counter(point.failures) for point in trained), Counter[str]()),
        "trained": trained[::-1],
        "evaluated": evaluated[::-1],
        "earlier": newest_steps[0] - 1 if len(steps) > len(newest_steps) else None,
        "until": until,
    }


def _event_curves(store: ObjectStore, span: tuple[int, int]) -> dict[str, Curve]:
    """Shares of the steps in which the learner waited and the engines had no request, in percent, and the log-prob gap
    of each step.
    """
    entries = read_events(store)
    idle = {step: event.took.idle for step, event in finished_steps(entries).items()}
    learner = {step: 100 * time.learner_share for step, time in idle.items() if time.learner_share is not None}
    engines = {step: 100 * time.engine_share for step, time in idle.items() if time.engine_share is not None}
    gap = {step: mismatch.mean for step, mismatch in measured_gaps(entries).items()}
    return {
        name: curve({step: number for step, number in numbers.items() if span[0] <= step <= span[1]}, span)
        for name, numbers in (("idle_learner", learner), ("idle_engines", engines), ("gap", gap))
    }


def _rewards(points: Sequence[StepPoint]) -> dict[int, float]:
    return {point.batch.step: point.reward for point in points if point.reward is not None}
