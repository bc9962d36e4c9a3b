"""Prometheus metrics of an engine agent."""

from __future__ import annotations

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.watch import Watch


def observe_engine(watch: Watch, adapters: LoadedAdapters) -> None:
    """Registers metrics of the engine's state, its adapters, and the last load."""

    def versions() -> dict[str, float]:
        held_adapters = list(adapters.held.values())
        proved = sum(item.proved for item in held_adapters)
        return {"proved": proved, "unproved": len(held_adapters) - proved}

    def load_seconds() -> dict[str, float]:
        last = adapters.last
        if last is None:
            return {}
        return {"fetch": last.fetch_seconds, "load": last.load_seconds, "prove": last.prove_seconds}

    observe(Metric.ENGINE_UP, lambda: float(watch.state.up))
    observe(Metric.ENGINE_RESTARTS, lambda: watch.restarts)
    observe(Metric.VERSIONS, versions)
    observe(Metric.LOAD_SECONDS, load_seconds)
    observe(Metric.KV_USAGE, lambda: watch.load.kv_usage)
    observe(Metric.REQUESTS, lambda: {"running": watch.load.running, "waiting": watch.load.waiting})
    observe(Metric.PREEMPTIONS, lambda: watch.load.preemptions)
    observe(Metric.ENGINE_IDLE_SECONDS, lambda: {} if watch.idle is None else watch.idle.idle)
    observe(Metric.PROBE_GAP, lambda: 0.0 if adapters.last is None else adapters.last.gap)
