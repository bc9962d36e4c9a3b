"""Every span, attribute and metric name, in one place. GenAI semantic conventions where they have a word for it."""

from __future__ import annotations

from typing import NamedTuple


class SpanName:
    """Spans, named after domain verbs. The tree, on a cluster beneath the operator's first `reconcile` of the job:

    job > group > episode > model_call, tool_call > tool_execute
                > score
        > step > update, publish > load > prove
        > evaluate > group > ..., checkpoint

    A group hangs on the job, not on a step: with staleness it may run through several.
    """

    JOB = "kestrl.job"
    STEP = "kestrl.step"
    GROUP = "kestrl.group"
    EPISODE = "kestrl.episode"
    MODEL_CALL = "kestrl.model_call"
    TOOL_CALL = "kestrl.tool_call"
    TOOL_EXECUTE = "kestrl.tool_execute"
    SCORE = "kestrl.score"
    UPDATE = "kestrl.update"
    PUBLISH = "kestrl.publish"
    LOAD = "kestrl.load"
    PROVE = "kestrl.prove"
    EVALUATE = "kestrl.evaluate"
    CHECKPOINT = "kestrl.checkpoint"
    RECONCILE = "kestrl.reconcile"


class Attr:
    """Attributes."""

    COMPONENT = "kestrl.component"
    JOB = "kestrl.job.name"
    RUN = "kestrl.run.id"
    STEP = "kestrl.step"
    GROUP_ID = "kestrl.group.id"
    EPISODE_ID = "kestrl.episode.id"
    SCENARIO_ID = "kestrl.scenario.id"
    POLICY = "kestrl.policy.version"
    ENGINE = "kestrl.engine"
    TURN = "kestrl.turn"
    OUTCOME = "kestrl.tool.outcome"
    STOP_REASON = "kestrl.stop_reason"
    REWARD = "kestrl.reward"
    ATTEMPTS = "kestrl.job.attempts"
    PARKED = "kestrl.job.parked"
    FAILURE_BOUNDARY = "kestrl.failure.boundary"
    ERROR_TYPE = "error.type"
    TOOL_NAME = "gen_ai.tool.name"
    MODEL = "gen_ai.request.model"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    FINISH_REASON = "gen_ai.response.finish_reasons"


class Instrument(NamedTuple):
    """A metric. On the Prometheus endpoint dots are underscores, and a counter ends in `_total`."""

    name: str
    description: str
    unit: str = "1"
    labels: tuple[str, ...] = ()
    counts: bool = False
    """Whether it only grows."""


class Metric:
    """Every metric: of all services, then by the service that has it."""

    RPC_RUNNING = Instrument("kestrl.rpc.running", "Calls being answered", labels=("method",))
    RPC_CALLS = Instrument(
        "kestrl.rpc.calls", "Calls answered; failure is boundary/code", labels=("method", "failure"), counts=True
    )

    RECONCILES = Instrument("kestrl.operator.reconciles", "Passes over jobs", labels=("result",), counts=True)
    OPERATOR_QUEUE = Instrument("kestrl.operator.queue", "Jobs that wait for a pass, now or later")
    OPERATOR_LEADER = Instrument("kestrl.operator.leader", "Whether this replica leads")
    OPERATOR_REQUESTS = Instrument("kestrl.operator.requests", "Requests to the apiserver, watches aside", counts=True)
    OPERATOR_FOLLOWED = Instrument("kestrl.operator.followed", "Learners whose progress is listened to")
    OPERATOR_JOBS = Instrument("kestrl.operator.jobs", "Jobs", labels=("phase",))
    OPERATOR_DEAF = Instrument("kestrl.operator.deaf", "Jobs that the watch did not tell of between two audits")
    WATCH_AGE = Instrument("kestrl.operator.watch.age", "Since lists and watches were last compared", "s")

    STEP = Instrument("kestrl.learner.step", "Optimiser steps done")
    STEPS = Instrument("kestrl.learner.steps", "Optimiser steps in all")
    POLICY = Instrument("kestrl.learner.policy", "Step of the newest version that engines have proved")
    ENGINES_PROVED = Instrument("kestrl.learner.engines.proved", "Engines that have proved the newest version")
    ENGINES = Instrument("kestrl.learner.engines", "Engines of the job")
    MEAN = Instrument("kestrl.learner.mean", "Means over the last episodes, such as reward", labels=("of",))
    TOKENS_PER_SECOND = Instrument(
        "kestrl.learner.tokens_per_second", "Sampled tokens of the last step a second", "1/s"
    )
    STALENESS = Instrument("kestrl.learner.staleness", "Largest staleness of the last step's groups", "{step}")
    QUARANTINED = Instrument(
        "kestrl.learner.engines.quarantined",
        "Versions that an engine could not prove, tried again later",
        labels=("engine",),
    )
    GAP = Instrument(
        "kestrl.learner.logprob_gap",
        "Of the last step's tokens, to the policies that sampled them",
        labels=("statistic",),
    )
    STEP_SECONDS = Instrument("kestrl.learner.step.seconds", "Parts of the last step", "s", ("part",))
    ROWS_SKIPPED = Instrument("kestrl.learner.rows.skipped", "Rows whose prompts leave no room in the context")
    GROUPS_RUNNING = Instrument("kestrl.learner.groups.running", "Groups at the workers")
    ADMISSION = Instrument("kestrl.learner.admission", "Episodes that may run at once, as the engines' load allows")
    GROUPS_READY = Instrument("kestrl.learner.groups.ready", "Groups that wait to be trained on")
    PUBLISH_SECONDS = Instrument(
        "kestrl.learner.publish.seconds", "From weights to engines that proved them, last time", "s"
    )
    PROBE_DISTANCE = Instrument(
        "kestrl.learner.probe.distance", "Of the newest version's probe log-probs from those of the one before, in nats"
    )
    FAILURES = Instrument(
        "kestrl.learner.failures", "Failed episodes and groups", labels=("boundary", "code"), counts=True
    )

    STALE = Instrument(
        "kestrl.learner.stale", "Groups given up as too old, by age in steps", labels=("age",), counts=True
    )
    STALE_SECONDS = Instrument(
        "kestrl.learner.stale.seconds", "That groups given up as too old had run", "s", counts=True
    )
    STALE_TOKENS = Instrument(
        "kestrl.learner.stale.tokens", "Sampled tokens of ended groups given up as too old", "{token}", counts=True
    )

    EPISODES_RUNNING = Instrument("kestrl.rollout.episodes.running", "Episodes taken on and not ended")
    EPISODES_LIMIT = Instrument("kestrl.rollout.episodes.limit", "Episodes at once at the most")
    EPISODES = Instrument("kestrl.rollout.episodes", "Ended episodes", labels=("stop_reason", "failure"), counts=True)
    TOKENS = Instrument("kestrl.rollout.tokens", "Sampled tokens", "{token}", counts=True)
    TURNS = Instrument("kestrl.rollout.turns", "Completions sampled", counts=True)
    TURN_SECONDS = Instrument("kestrl.rollout.turn.seconds", "Spent waiting for completions", "s", counts=True)
    TOOL_CALLS = Instrument("kestrl.rollout.tool_calls", "Tool calls", labels=("outcome",), counts=True)

    SESSIONS = Instrument("kestrl.tools.sessions", "Open sessions, one an episode")
    HANGING = Instrument("kestrl.tools.hanging", "Calls that never came back", labels=("tool",))
    REWARD_RESTARTS = Instrument(
        "kestrl.judge.restarts", "Processes of a reward started again", labels=("reward",), counts=True
    )

    ENGINE_UP = Instrument("kestrl.inference.up", "Whether the engine answers")
    ENGINE_RESTARTS = Instrument("kestrl.inference.restarts", "Times the engine came back", counts=True)
    VERSIONS = Instrument("kestrl.inference.versions", "Versions in the engine", labels=("state",))
    LOAD_SECONDS = Instrument("kestrl.inference.load.seconds", "Parts of the last version's load", "s", ("part",))
    KV_USAGE = Instrument("kestrl.inference.kv_usage", "Share of the engine's key-value cache in use")
    REQUESTS = Instrument("kestrl.inference.requests", "Requests in the engine", labels=("state",))
    PREEMPTIONS = Instrument("kestrl.inference.preemptions", "Requests that the engine put back for want of cache")
    PROBE_GAP = Instrument("kestrl.inference.probe_gap", "Largest difference on the last version's probe")
