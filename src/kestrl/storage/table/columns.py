"""The columns of the table of episodes. Free of pyarrow, which loads slowly and not every process has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SCHEMA_VERSION = 1
"""Version of the schema, which every file names. New columns do not change it."""
VERSION_KEY = b"kestrl.episodes"
"""Key of the version in a file's metadata."""

Kind = str | list[Any] | Mapping[str, Any]
"""Type of a column: a name of a scalar type, `[kind]` for a list, or `{name: kind}` for a struct."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its meaning."""

    name: str
    kind: Kind
    meaning: str


MESSAGES: Kind = [{"role": "string", "content": "string", "tool_calls": "string", "other": "string"}]
NAMED: Kind = [{"name": "string", "value": "double"}]

SCALARS = (
    Column("run", "string", "id of the run"),
    Column("step", "int64", "optimiser step, as the live view numbers it; of an evaluation, the steps done before it"),
    Column("purpose", "string", "`train` or `evaluation`"),
    Column("group", "string", "id of the group"),
    Column("scenario", "string", "id of the scenario"),
    Column("episode", "string", "id of the episode; null in the one row of a group that failed as a whole"),
    Column(
        "outcome",
        "string",
        "what became of the group: `trained`, `shrunk`, `retried`, `dropped`, `masked`, `skipped`, `stale` or "
        "`evaluated`",
    ),
    Column("attempt", "int64", "number of the attempt at the scenario, from 0"),
    Column("reason", "string", "why the group was not trained on; empty if it was"),
    Column("reward", "double", "null if the episode was not scored"),
    Column("advantage", "double", "mean over the episode's sampled tokens; null if it was not trained on"),
    Column("failure_boundary", "string", "null unless something other than the model failed"),
    Column("failure_code", "string", "as above"),
    Column("stop", "string", "why the episode ended"),
    Column("num_turns", "int64", "turns of the model"),
    Column("num_tool_calls", "int64", "attempted tool calls"),
    Column("sampled_tokens", "int64", "tokens that the model sampled"),
    Column("policy", "string", "version of the policy that the episode began with; null is the base model"),
    Column("engine", "string", "engine of the episode"),
    Column("duration_s", "double", "seconds from the episode's begin to its end"),
    Column("started_at", "double", "Unix seconds"),
)
"""Flat columns, which a query reads first."""

CONTENT = (
    Column("prompt", MESSAGES, "messages of the scenario"),
    Column("messages", MESSAGES, "the conversation; `tool_calls` and `other` are JSON"),
    Column("tools", "string", "JSON: schemas of the offered tools, where the judge shows them"),
    Column("rewards", NAMED, "components of the reward before weighting"),
    Column("metrics", NAMED, "metrics that rewards and the agent report"),
    Column("reward_weights", NAMED, "weight of each component"),
    Column("turn_rewards", ["double"], "weighted reward of each turn"),
    Column("ground_truth", "string", "JSON: the expected answer"),
    Column("answer", "string", "the answer that a reward read out of the episode"),
    Column("scoring", "string", "JSON: what each component reports for people"),
    Column(
        "turns",
        [
            {
                "index": "int64",
                "row": "int64",
                "start": "int64",
                "end": "int64",
                "text": "string",
                "finish_reason": "string",
                "engine": "string",
                "policy": "string",
                "seconds": "double",
                "reasoning_opened": "bool",
                "seed": "int64",
            }
        ],
        "policy and engine of the sampled tokens `start` to `end` of a row, with the time and text of the turn",
    ),
    Column(
        "tool_calls",
        [
            {
                "turn": "int64",
                "name": "string",
                "raw": "string",
                "arguments": "string",
                "outcome": "string",
                "text": "string",
                "data": "string",
                "seconds": "double",
            }
        ],
        "attempted tool calls; `arguments` and `data` are JSON",
    ),
    Column(
        "rows",
        [
            {
                "token_ids": ["int32"],
                "mask": ["uint8"],
                "logprobs": ["float"],
                "learner_logprobs": ["float"],
                "advantages": ["float"],
                "policies": ["string"],
            }
        ],
        "token sequences; `mask` is 1 on sampled tokens; log-probabilities and advantages are 0 elsewhere, and "
        "`learner_logprobs` and `advantages` null in episodes that were not trained on",
    ),
    Column("index", "int64", "position of the episode in its group"),
    Column("group_index", "int64", "position of the group in the file"),
    Column("seed", "int64", "seed of sampling"),
    Column("main_row", "int64", "the row that carries the task"),
    Column("loop_reward", "double", "reward that the agent loop returned"),
    Column("environments", "string", "JSON: final states of environments"),
    Column("info", "string", "JSON: what the run of an agent by URL reported"),
    Column("trace_id", "string", "id of the trace; empty if it was not traced"),
    Column("failure_message", "string", "text of the failure"),
    Column("failure_retryable", "bool", "whether another attempt may succeed"),
    Column("failure_component", "string", "component that failed"),
    Column("policy_job", "string", "job of the policy"),
    Column("policy_step", "int64", "step of the policy"),
    Column("policy_sha256", "string", "digest of the policy's weights"),
    Column("ordinal", "int64", "position of the scenario in the data"),
    Column("scenario_tools", ["string"], "names of the scenario's tools; null is every tool of the job"),
    Column("tools_kwargs", "string", "JSON: arguments of the scenario's tools"),
    Column("agent", "string", "agent loop of the scenario; empty for the job's default"),
    Column("metadata", "string", "JSON: metadata of the scenario"),
    Column("group_scoring", "string", "JSON, in the group's first row: how components scored the whole group"),
)
COLUMNS = (*SCALARS, *CONTENT)
KINDS: Mapping[str, Kind] = MappingProxyType({column.name: column.kind for column in COLUMNS})


def kind_words(kind: Kind) -> str:
    """A type in the notation of Parquet's documentation, such as `list<struct<name: string, value: double>>`."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return f"list<{kind_words(kind[0])}>"
    return f"struct<{', '.join(f'{name}: {kind_words(member)}' for name, member in kind.items())}>"
