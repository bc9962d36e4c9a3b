"""What a watcher of a run's progress is sent at once, as opposed to numbers, which can wait. Pure."""

from __future__ import annotations

from kestrl.api.learner.v1 import learner_pb2 as pb

NUMBERS = (
    "step", "means", "policy", "policy_uri", "policy_parent", "tokens_per_second", "episodes_per_second", "eta_seconds",
    "skipped_rows", "groups_running", "groups_ready", "checkpoint_step", "gathering", "learning_warning", "message",
    "engines_converged", "not_learned", "tool_warning",
)  # fmt: skip
"""Fields that change while a run goes on as it should."""


def state_of(report: pb.WatchProgressResponse) -> bytes:
    """The states in a report, as bytes that differ if one of them does: each field that is not a number, whether there
    is a version, a checkpoint, a mean reward and a worker, which kinds of failures there were, and the engines' states.
    """
    state = pb.WatchProgressResponse()
    state.CopyFrom(report)
    for name in NUMBERS:
        state.ClearField(name)
    state.workers = min(1, report.workers)
    for kind in report.failures:
        state.failures[kind] = 1
    for engine in state.engines:
        engine.lag = 0
        engine.ClearField("policy")
    facts = (
        report.HasField("policy"),
        report.HasField("checkpoint_step"),
        "reward" in report.means,
        bool(report.means.get("tool_calls")),
        bool(report.step),
        bool(report.learning_warning),
        [engine.HasField("policy") for engine in report.engines],
        report.engines_converged >= report.engines_total,
    )
    return state.SerializeToString(deterministic=True) + repr(facts).encode()
