"""Geometry of the charts, which the templates write as SVG. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 720.0, 140.0, 8.0
STRIP_WIDTH, STRIP_HEIGHT, DOT = 360.0, 34.0, 5.0
LAYERS = 3
"""Dots of equal rewards above each other in a strip; further ones stand beside them."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A point or bar of a chart."""

    key: int
    """Step or place that it stands for."""
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    kind: str = ""
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve with its points and range."""

    points: str
    """Corners, as SVG's `polyline` takes them."""
    marks: Sequence[ChartMark]
    low: float
    high: float


def _across(key: int, first: int, last: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * ((key - first) / (last - first) if last > first else 0.5)


def curve(numbers: Mapping[int, float], span: tuple[int, int]) -> Curve:
    """The curve of numbers by step, over a range of steps."""
    low, high = min(numbers.values(), default=0.0), max(numbers.values(), default=0.0)
    marks = [
        ChartMark(step, _across(step, *span), _height(number, low, high), amount=number)
        for step, number in sorted(numbers.items())
    ]
    return Curve(" ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in marks), marks, low, high)


def _height(number: float, low: float, high: float) -> float:
    share = (number - low) / (high - low) if high > low else 0.5
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share


def bars(counts: Mapping[int, Mapping[str, int]], span: tuple[int, int]) -> Sequence[ChartMark]:
    """Stacked bars of counts by kind, by step."""
    highest = max((sum(kinds.values()) for kinds in counts.values()), default=0)
    width = max(1.0, min(14.0, (WIDTH - 2 * MARGIN) / max(1, span[1] - span[0] + 1) - 1))
    marks: list[ChartMark] = []
    for step, kinds in sorted(counts.items()):
        base = HEIGHT - MARGIN
        for kind, count in sorted(kinds.items()):
            height = (HEIGHT - 2 * MARGIN) * count / highest
            base -= height
            marks.append(ChartMark(step, _across(step, *span) - width / 2, base, width, height, kind, count))
    return marks


def strip(rewards: Sequence[float | None], low: float, high: float) -> Sequence[ChartMark]:
    """Dots of a group's episodes by reward; those without a reward stand at the left end."""
    column_counts: Counter[int] = Counter()
    marks: list[ChartMark] = []
    left_margin = 4 * DOT
    for place, reward in enumerate(rewards):
        share = 0.0 if reward is None else (reward - low) / (high - low) if high > low else 0.5
        x = DOT if reward is None else left_margin + (STRIP_WIDTH - left_margin - 2 * DOT) * share
        column = round(x / (2 * DOT))
        layer = column_counts[column]
        column_counts[column] += 1
        right = layer // LAYERS * DOT
        marks.append(ChartMark(place, min(x + right, STRIP_WIDTH - DOT), STRIP_HEIGHT - DOT - layer % LAYERS * 2 * DOT))
    return marks
