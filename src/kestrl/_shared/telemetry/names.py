"""All names of spans, attributes and metrics. Names of the GenAI semantic conventions where they exist."""

from __future__ import annotations

from typing import NamedTuple


class SpanName:
    """Names of spans. The tree, on a cluster below the operator's first `reconcile` of the job:

    job > step > update, publish > load > prove
        > evaluate, checkpoint
    group > episode > model_call, tool_call > tool_execute
          > score > judge_call
          > advantage

    A group is a trace of its own, linked to the span that began it: a collector decides on traces, and keeps groups or
    drops them.
    """

    JOB = "kestrl.job"
    """A process of a run that trains or evaluates; the root on one machine."""
    STEP = "kestrl.step"
    """An optimiser step, from its first group to the verified policy."""
    GROUP = "kestrl.group"
    """A group: sent and decided on by the learner, run by a worker. A trace of its own, linked to the job or the
    evaluation."""
    EPISODE = "kestrl.episode"
    """An attempt. It ends with its work and is sent when its group is scored."""
    MODEL_CALL = "kestrl.model_call"
    """A completion that an engine samples."""
    TOOL_CALL = "kestrl.tool_call"
    """A tool call as the worker sees it."""
    TOOL_EXECUTE = "kestrl.tool_execute"
    """A tool call in the tool service."""
    SCORE = "kestrl.score"
    """The scoring of a group, in the worker and in the judge."""
    JUDGE_CALL = "kestrl.judge_call"
    """A request to a judge model."""
    ADVANTAGE = "kestrl.advantage"
    """An episode that a step has trained on, once its advantage is known; in the trace of its group."""
    UPDATE = "kestrl.update"
    """The computation of a step: log-probs, loss and update."""
    PUBLISH = "kestrl.publish"
    """The publication of a policy until engines have verified it."""
    LOAD = "kestrl.load"
    """The loading of a policy into an engine."""
    PROVE = "kestrl.prove"
    """The verification of a policy by its probe."""
    EVALUATE = "kestrl.evaluate"
    """An evaluation on the held-out questions."""
    CHECKPOINT = "kestrl.checkpoint"
    """The writing of a checkpoint."""
    RECONCILE = "kestrl.reconcile"
    """A reconcile of a job by the operator; the root on a cluster."""


class EventName:
    """Names of events within spans."""

    FORK = "kestrl.fork"
    """A call of a client began a row though the episode has others."""


class Attr:
    """Attributes."""

    JOB = "kestrl.job.name"
    """Name of the job; of the resource and of `kestrl.job` and `kestrl.reconcile`."""
    RUN = "kestrl.run.id"
    """Id of the run; of the resource and of `kestrl.job`."""
    STEP = "kestrl.step"
    """Number of the optimiser step."""
    GROUP_ID = "kestrl.group.id"
    """Id of the group."""
    EPISODE_ID = "kestrl.episode.id"
    """Id of the episode, as `kestrl episodes` names it."""
    SCENARIO_ID = "kestrl.scenario.id"
    """Id of the scenario."""
    POLICY = "kestrl.policy.version"
    """Name of the policy's version."""
    ENGINE = "kestrl.engine"
    """Name of the engine."""
    TURN = "kestrl.turn"
    """Number of the turn, from 0."""
    OUTCOME = "kestrl.tool.outcome"
    """Outcome of a tool call: `ok`, `invalid_json`, `schema_violation` and so on."""
    STOP_REASON = "kestrl.stop_reason"
    """Why the episode ended."""
    REWARD = "kestrl.reward"
    """Reward of a scored episode."""
    REWARD_DISTANCE = "kestrl.reward.distance"
    """Distance of an episode's reward from the mean of its group's: 0 where the advantage relative to the group is."""
    ADVANTAGE = "kestrl.advantage"
    """Largest size of the advantages of an episode's tokens, as its step has trained on them."""
    LOWEST_REWARD = "kestrl.reward.lowest"
    """Lowest reward of a scored group."""
    HIGHEST_REWARD = "kestrl.reward.highest"
    """Highest reward of a scored group; equal to the lowest in a group without an advantage."""
    ATTEMPTS = "kestrl.job.attempts"
    """Restarts of the job's learner that count."""
    PARKED = "kestrl.job.parked"
    """Whether the job waits for a person."""
    FAILURE_BOUNDARY = "kestrl.failure.boundary"
    """Where a failure came from; of every span that failed."""
    FORK_REASON = "kestrl.fork.reason"
    """Why a row was begun; of the event `kestrl.fork`."""
    ERROR_TYPE = "error.type"
    """Code of a failure."""
    TOOL_NAME = "gen_ai.tool.name"
    """Name of the tool."""
    MODEL = "gen_ai.request.model"
    """Policy or judge model that is called."""
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    """Tokens of the prompt."""
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    """Sampled tokens."""
    FINISH_REASON = "gen_ai.response.finish_reasons"
    """Why sampling ended."""


class Instrument(NamedTuple):
    """A metric. On the Prometheus endpoint dots are underscores, and the names of counters end in `_total`."""

    name: str
    description: str
    unit: str = "1"
    labels: tuple[str, ...] = ()
    counts: bool = False
    """Whether it is a counter."""

    @property
    def prometheus(self) -> str:
        """The name at the Prometheus endpoint."""
        name = self.name.replace(".", "_")
        unit = "_seconds" if self.unit == "s" and not name.endswith("seconds") else ""
        return name + unit + ("_total" if self.counts else "")


OF_JOB = ("namespace", "kestrl_dev_job")
"""Labels that name a job in metrics of the operator. Prometheus gives them to the series of a job's pods."""


class Metric:
    """All metrics: those of every service, then by service."""

    RPC_RUNNING = Instrument("kestrl.rpc.running", "Calls being answered", labels=("method",))
    RPC_CALLS = Instrument(
        "kestrl.rpc.calls", "Calls answered; failure is boundary/code", labels=("method", "failure"), counts=True
    )

    RECONCILES = Instrument("kestrl.operator.reconciles", "Reconciles of jobs", labels=("result",), counts=True)
    OPERATOR_QUEUE = Instrument("kestrl.operator.queue", "Jobs in the work queue")
    OPERATOR_LEADER = Instrument("kestrl.operator.leader", "Whether this replica is the leader")
    OPERATOR_REQUESTS = Instrument(
        "kestrl.operator.requests", "Requests to the API server, without watches", counts=True
    )
    OPERATOR_FOLLOWED = Instrument("kestrl.operator.followed", "Learners whose progress is streamed")
    RECONCILE_SECONDS = Instrument("kestrl.operator.reconcile.duration", "Duration of a pass over a job", "s")
    OPERATOR_JOBS = Instrument("kestrl.operator.jobs", "Jobs", labels=("phase",))
    JOB_INFO = Instrument("kestrl.job.info", "1 for each job", labels=(*OF_JOB, "phase", "reason"))
    JOB_CONDITION = Instrument(
        "kestrl.job.condition", "1 where a condition of a job is true, 0 where it is false", labels=(*OF_JOB, "type")
    )
    JOB_DEVICES = Instrument("kestrl.job.devices", "Devices that a job holds", labels=(*OF_JOB, "profile"))
    OPERATOR_FOREIGN_JOBS = Instrument(
        "kestrl.operator.foreign.jobs", "Jobs that another installation of the operator reconciles"
    )
    OPERATOR_STALE_WATCH = Instrument("kestrl.operator.deaf", "Jobs whose changes the watch missed between two audits")
    WATCH_AGE = Instrument("kestrl.operator.watch.age", "Time since lists and watches were last compared", "s")

    STEP = Instrument("kestrl.learner.step", "Finished optimiser steps")
    STEPS = Instrument("kestrl.learner.steps", "Total optimiser steps")
    POLICY = Instrument("kestrl.learner.policy", "Step of the newest version verified by engines")
    ENGINES_PROVED = Instrument("kestrl.learner.engines.proved", "Engines that have verified the newest version")
    ENGINES = Instrument("kestrl.learner.engines", "Engines of the job")
    MEAN = Instrument("kestrl.learner.mean", "Means over the last episodes, such as reward", labels=("of",))
    EVALUATION = Instrument("kestrl.learner.evaluation", "Means of the last evaluation", labels=("of",))
    TOKENS_PER_SECOND = Instrument(
        "kestrl.learner.tokens_per_second", "Sampled tokens per second of the last step", "1/s"
    )
    STALENESS = Instrument("kestrl.learner.staleness", "Largest age of the last step's trained tokens", "{step}")
    QUARANTINED = Instrument(
        "kestrl.learner.engines.quarantined",
        "Versions that an engine could not verify, to be retried",
        labels=("engine",),
    )
    GAP = Instrument(
        "kestrl.learner.logprob_gap",
        "Log-prob gap of the last step's tokens to the policies that sampled them",
        labels=("statistic",),
    )
    STEP_SECONDS = Instrument("kestrl.learner.step.seconds", "Duration of the parts of the last step", "s", ("part",))
    ROWS_SKIPPED = Instrument("kestrl.learner.rows.skipped", "Rows whose prompts do not fit the context")
    GROUPS_RUNNING = Instrument("kestrl.learner.groups.running", "Groups in progress at the workers")
    ADMISSION = Instrument("kestrl.learner.admission", "Maximum concurrent episodes for the engines' load")
    GROUPS_READY = Instrument("kestrl.learner.groups.ready", "Groups waiting for training")
    PUBLISH_SECONDS = Instrument(
        "kestrl.learner.publish.seconds", "Duration of the last publication, from weights to verified engines", "s"
    )
    PROBE_DISTANCE = Instrument(
        "kestrl.learner.probe.distance", "Difference of probe log-probs between the last two versions, in nats"
    )
    FAILURES = Instrument(
        "kestrl.learner.failures", "Failed episodes and groups", labels=("boundary", "code"), counts=True
    )

    TOOL_CALLS_PER_EPISODE = Instrument(
        "kestrl.learner.tools.calls_per_episode", "Tool calls per episode, of the last that were offered tools"
    )
    TOOL_OUTCOME_SHARE = Instrument(
        "kestrl.learner.tools.outcome_share",
        "Share of each outcome in the calls of the last episodes",
        labels=("outcome",),
    )
    TOOL_WARNING = Instrument(
        "kestrl.learner.tools.warning", "1 while no call of the last episodes works", labels=("reason",)
    )

    STALE = Instrument(
        "kestrl.learner.stale", "Groups released as too old, by age in steps", labels=("age",), counts=True
    )
    LEARNER_IDLE_SECONDS = Instrument(
        "kestrl.learner.idle",
        "Time in steps in which the learner waited, by what for",
        "s",
        labels=("reason",),
        counts=True,
    )
    ENGINES_IDLE_SECONDS = Instrument(
        "kestrl.learner.engines.idle",
        "Time in steps in which engines had no request, of all together, by the reason",
        "s",
        labels=("reason",),
        counts=True,
    )
    STALE_SECONDS = Instrument(
        "kestrl.learner.stale.seconds", "Duration of groups released as too old", "s", counts=True
    )
    STALE_TOKENS = Instrument(
        "kestrl.learner.stale.tokens", "Sampled tokens of groups released as too old", "{token}", counts=True
    )
    MASKED_TOKENS = Instrument(
        "kestrl.learner.stale.masked",
        "Tokens of trained groups that were too old to be trained on",
        "{token}",
        counts=True,
    )

    EPISODES_RUNNING = Instrument("kestrl.rollout.episodes.running", "Episodes in progress")
    EPISODES_LIMIT = Instrument("kestrl.rollout.episodes.limit", "Maximum concurrent episodes")
    EPISODES = Instrument(
        "kestrl.rollout.episodes", "Finished episodes", labels=("stop_reason", "failure"), counts=True
    )
    TOKENS = Instrument("kestrl.rollout.tokens", "Sampled tokens", "{token}", counts=True)
    TURNS = Instrument("kestrl.rollout.turns", "Sampled completions", counts=True)
    TURN_SECONDS = Instrument("kestrl.rollout.turn.seconds", "Time waiting for completions", "s", counts=True)
    TOOL_CALLS = Instrument("kestrl.rollout.tool_calls", "Tool calls", labels=("outcome",), counts=True)

    SESSIONS = Instrument("kestrl.tools.sessions", "Open sessions, one per episode")
    HANGING = Instrument("kestrl.tools.hanging", "Calls that have not returned", labels=("tool",))
    TOOL_SERVERS_UNAVAILABLE = Instrument(
        "kestrl.tools.unavailable", "1 for a server of tools whose last call or connection failed", labels=("server",)
    )
    SANDBOX_BACKEND = Instrument(
        "kestrl.sandbox.backend", "1 for the back-end in which code runs", labels=("backend", "isolation")
    )
    SANDBOX_RUNNING = Instrument("kestrl.sandbox.running", "Sandboxes in use")
    SANDBOX_WAITING = Instrument("kestrl.sandbox.waiting", "Runs that wait for a sandbox")
    SANDBOX_RUNS = Instrument("kestrl.sandbox.runs", "Runs of code by outcome", labels=("outcome",), counts=True)
    REWARD_RESTARTS = Instrument(
        "kestrl.judge.restarts", "Restarts of a reward's processes", labels=("reward",), counts=True
    )
    JUDGE_CALLS = Instrument(
        "kestrl.judge.calls",
        "Requests to judge models; the result is ok, cached, malformed, or why there was no answer",
        labels=("model", "result"),
        counts=True,
    )
    JUDGE_TOKENS = Instrument(
        "kestrl.judge.tokens", "Tokens of judge models", "{token}", labels=("model", "kind"), counts=True
    )
    JUDGE_COST = Instrument(
        "kestrl.judge.cost", "Cost of judge models by the prices in the job", "USD", labels=("model",), counts=True
    )
    JUDGE_SECONDS = Instrument(
        "kestrl.judge.seconds", "Time waiting for judge models", "s", labels=("model",), counts=True
    )
    JUDGE_UNSCORED = Instrument(
        "kestrl.judge.unscored", "Groups that no judge model scored", labels=("reason",), counts=True
    )
    JUDGE_SKIPPED = Instrument("kestrl.judge.skipped", "Groups without episodes to compare", counts=True)

    ENGINE_UP = Instrument("kestrl.inference.up", "Whether the engine is reachable")
    ENGINE_RESTARTS = Instrument("kestrl.inference.restarts", "Restarts of the engine", counts=True)
    VERSIONS = Instrument("kestrl.inference.versions", "Adapter versions in the engine", labels=("state",))
    LOAD_SECONDS = Instrument("kestrl.inference.load.seconds", "Duration of the parts of the last load", "s", ("part",))
    KV_USAGE = Instrument("kestrl.inference.kv_usage", "Share of the engine's key-value cache in use")
    REQUESTS = Instrument("kestrl.inference.requests", "Requests in the engine", labels=("state",))
    PREEMPTIONS = Instrument("kestrl.inference.preemptions", "Requests preempted by the engine for lack of cache")
    ENGINE_IDLE_SECONDS = Instrument(
        "kestrl.inference.idle", "Time without a request to the engine since its start", "s", counts=True
    )
    PROBE_GAP = Instrument("kestrl.inference.probe_gap", "Largest log-prob difference on the last version's probe")
