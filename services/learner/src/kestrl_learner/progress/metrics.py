"""Prometheus metrics of the learner's progress; those of its steps are the OpenTelemetry sink's."""

from __future__ import annotations

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl_learner.progress.progress import Progress, means_of


def observe_progress(progress: Progress) -> None:
    """Registers the metrics of a learner's progress."""

    def failures() -> dict[tuple[str, str], float]:
        split = {name.partition("/"): count for name, count in dict(progress.failures).items()}
        return {(boundary, code): count for (boundary, _, code), count in split.items()}

    observe(Metric.STEP, lambda: progress.step)
    observe(Metric.STEPS, lambda: progress.total_steps)
    observe(Metric.POLICY, lambda: -1 if progress.policy is None else progress.policy.step)
    observe(Metric.ENGINES_PROVED, lambda: progress.engines_converged)
    observe(Metric.ENGINES, lambda: progress.engines_total)
    observe(Metric.MEAN, lambda: means_of(progress.recent()))
    observe(Metric.TOKENS_PER_SECOND, lambda: progress.tokens_per_second)
    observe(Metric.GROUPS_RUNNING, lambda: progress.groups_running)
    observe(Metric.GROUPS_READY, lambda: progress.groups_ready)
    observe(Metric.PUBLISH_SECONDS, lambda: progress.publish_seconds)
    observe(Metric.PROBE_DISTANCE, lambda: {} if progress.probe_distance is None else progress.probe_distance)
    observe(Metric.TOOL_CALLS_PER_EPISODE, lambda: progress.tools.recent().calls_per_episode)
    observe(Metric.TOOL_OUTCOME_SHARE, lambda: progress.tools.recent().shares())
    observe(Metric.TOOL_WARNING, lambda: {} if progress.tool_warning is None else {progress.tool_warning.reason: 1.0})
    observe(Metric.FAILURES, failures)
    observe(Metric.ROWS_SKIPPED, lambda: len(progress.skipped))
    observe(Metric.STALE, lambda: {str(age): count for age, count in dict(progress.stale.by_age).items()})
    observe(Metric.STALE_SECONDS, lambda: progress.stale.seconds)
    observe(Metric.STALE_TOKENS, lambda: progress.stale.tokens)
