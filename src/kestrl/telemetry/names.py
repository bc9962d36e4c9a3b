"""Every span, attribute and metric name, in one place. GenAI semantic conventions where they have a word for it."""

from __future__ import annotations


class SpanName:
    """Spans, named after domain verbs. The tree:

    job > group > episode > turn > model_call, tool_call > tool_execute
                > score
        > step > update, publish > load > prove
        > evaluate > group > ..., checkpoint

    A group hangs on the job, not on a step: with staleness it may run through several.
    """

    JOB = "kestrl.job"
    STEP = "kestrl.step"
    GROUP = "kestrl.group"
    EPISODE = "kestrl.episode"
    TURN = "kestrl.turn"
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
    FAILURE_BOUNDARY = "kestrl.failure.boundary"
    ERROR_TYPE = "error.type"
    TOOL_NAME = "gen_ai.tool.name"
    MODEL = "gen_ai.request.model"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    FINISH_REASON = "gen_ai.response.finish_reasons"
