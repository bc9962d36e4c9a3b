"""Prometheus metrics of the learner's progress; those of its steps are the OpenTelemetry sink's."""

from __future__ import annotations

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl_learner.progress.progress import Progress
from kestrl_learner.progress.tool_health import outcome_shares


def observe_progress(progress: Progress) -> None:
    """Registers the metrics of a learner's progress."""

    def failures() -> dict[tuple[str, str], float]:
        split = {name.partition("/"): count for name, count in progress.state.history.failures.items()}
        return {(boundary, code): count for (boundary, _, code), count in split.items()}

    observe(Metric.STEP, lambda: progress.state.steps.done)
    observe(Metric.STEPS, lambda: progress.state.steps.total)
    observe(Metric.POLICY, lambda: -1 if (version := progress.state.policy.version) is None else version.step)
    observe(Metric.ENGINES_PROVED, lambda: progress.state.engines.verified)
    observe(Metric.ENGINES, lambda: progress.state.engines.total)
    observe(Metric.MEAN, lambda: progress.state.means)
    observe(Metric.TOKENS_PER_SECOND, lambda: progress.state.last_step.tokens_per_second)
    observe(Metric.GROUPS_RUNNING, lambda: progress.state.gauges.groups_running)
    observe(Metric.GROUPS_READY, lambda: progress.state.gauges.groups_ready)
    observe(Metric.PUBLISH_SECONDS, lambda: progress.state.policy.seconds)
    observe(
        Metric.PROBE_DISTANCE, lambda: {} if (distance := progress.state.policy.probe_distance) is None else distance
    )
    observe(Metric.TOOL_CALLS_PER_EPISODE, lambda: progress.tools.recent().calls_per_episode)
    observe(Metric.TOOL_OUTCOME_SHARE, lambda: outcome_shares(progress.tools.recent()))
    observe(Metric.TOOL_WARNING, lambda: {reason: 1.0} if (reason := progress.state.tools.warning_reason) else {})
    observe(Metric.FAILURES, failures)
    observe(Metric.ROWS_SKIPPED, lambda: progress.state.history.skipped_rows)
    observe(Metric.LEARNER_IDLE_SECONDS, lambda: progress.state.history.idle.learner)
    observe(Metric.ENGINES_IDLE_SECONDS, lambda: progress.state.history.idle.engines)
    observe(Metric.STALE, lambda: {str(age): count for age, count in progress.state.history.stale.by_age.items()})
    observe(Metric.STALE_SECONDS, lambda: progress.state.history.stale.seconds)
    observe(Metric.STALE_TOKENS, lambda: progress.state.history.stale.tokens)
    observe(Metric.MASKED_TOKENS, lambda: progress.state.history.stale.masked)
