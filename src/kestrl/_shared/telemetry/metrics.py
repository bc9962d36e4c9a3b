"""Metrics by callback: a service registers a function per metric, which is only called when metrics are read.

Without `set_up` nothing is read, and the SDK is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from kestrl._shared.telemetry.names import Instrument

Values = float | Mapping[str, float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, ...], float]
_meter = metrics.get_meter("kestrl")


def observe(instrument: Instrument, poll: Callable[[], Values]) -> None:
    """Registers a metric.

    Args:
        instrument: The metric.
        poll: Returns the current value; for a metric with labels, the values by label (by tuples of several labels). It
            is called from another thread, so it must not modify anything.
    """

    def look(_options: CallbackOptions) -> Iterable[Observation]:
        return list(_observations(instrument, poll()))

    make = _meter.create_observable_counter if instrument.counts else _meter.create_observable_gauge
    make(instrument.name, callbacks=[look], unit=instrument.unit, description=instrument.description)


def measured(instrument: Instrument, bounds: Sequence[float]) -> Callable[[float], None]:
    """The function that records a value in a histogram.

    Args:
        instrument: The metric.
        bounds: Upper bounds of its buckets.
    """
    histogram = _meter.create_histogram(
        instrument.name,
        unit=instrument.unit,
        description=instrument.description,
        explicit_bucket_boundaries_advisory=bounds,
    )
    return lambda value: histogram.record(value)


def _observations(instrument: Instrument, values: Values) -> Iterable[Observation]:
    if not isinstance(values, Mapping):
        yield Observation(values)
        return
    # A copy, since the service runs while its numbers are read.
    for labels, value in dict(values).items():
        label_values: tuple[str, ...] = (labels,) if isinstance(labels, str) else labels
        yield Observation(value, dict(zip(instrument.labels, label_values, strict=True)))
