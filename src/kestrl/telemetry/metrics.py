"""Metrics are read, not pushed: a service says once where a number can be looked up, and pays only when somebody looks.

Without `set_up` there is nobody who looks, and nothing of the SDK is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from kestrl.telemetry.names import Instrument

Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
_meter = metrics.get_meter("kestrl")


def observe(instrument: Instrument, read: Callable[[], Values]) -> None:
    """Offers a metric.

    Args:
        instrument: Which.
        read: Gives its value now; of a metric with labels, the values by label (by tuples of them, where there are several). It is
            called from another thread, so it must only look.
    """

    def look(_options: CallbackOptions) -> Iterable[Observation]:
        return list(_observations(instrument, read()))

    make = _meter.create_observable_counter if instrument.counts else _meter.create_observable_gauge
    make(instrument.name, callbacks=[look], unit=instrument.unit, description=instrument.description)


def _observations(instrument: Instrument, values: Values) -> Iterable[Observation]:
    if not isinstance(values, Mapping):
        yield Observation(values)
        return
    # A copy: the service goes on while its numbers are read.
    for labels, value in dict(values).items():
        given: tuple[str, ...] = (labels,) if isinstance(labels, str) else labels
        yield Observation(value, dict(zip(instrument.labels, given, strict=True)))
