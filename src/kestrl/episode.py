"""What is attempted and what came of it: scenarios, episodes as exact tokens, groups.

Frozen data shared by every process. Token sequences are `array`s, so that a light service needs no numpy:
ids are C ints (`'i'`), log-probabilities C floats (`'f'`), masks bytes of 0 and 1. All three of a row have one length.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kestrl.errors import Failure

Json = Any
"""A JSON value: str, int, float, bool, None, list or dict of such."""

BASE_MODEL_NAME = "base"
"""The name every engine serves the base model under; adapters are served under `PolicyVersion.name`."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """An immutable LoRA adapter. Never overwritten, never reused."""

    job: str
    step: int
    """Optimiser steps it has seen; 0 is the untouched adapter, which equals the base model."""
    sha256: str
    """Digest of the adapter's weights, 64 hex digits."""

    @property
    def name(self) -> str:
        """The name an engine serves it under: unique to the bytes, so that no cache can mix two versions."""
        return f"{self.job}.{self.step}.{self.sha256[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One task to attempt."""

    id: str
    ordinal: int
    """Position in its data set, from 0; the ledger accounts for every ordinal of every epoch."""
    messages: Sequence[Mapping[str, str]]
    """The prompt: `{"role": "system"|"user"|"assistant"|"tool", "content": text}` each."""
    tools: Sequence[str] | None = None
    """Names of the tools offered; None offers every tool of the job."""
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Json]]] = field(default_factory=dict[str, Any])
    """Per tool: `create_kwargs` for the episode's instance, `execute_kwargs` merged into every call. Those of an environment's
    instance stand under the environment's name. Hidden from the model."""
    agent: str = ""
    """Name of the agent loop that attempts it; empty for the job's own."""
    ground_truth: Json = None
    """What rewards compare with. Never shown to the model."""
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Any])


LARGEST_REWARD = 1e30
"""Magnitude above which a reward is refused: float32 and the sums of a group hold it with room to spare."""


RESERVED_METRICS = frozenset(
    {"reward", "step", "episodes", "duration", "loss", "grad_norm", "gap", "idle_groups", "staleness", "seconds"}
)
"""Names of the learner's own numbers beside an episode's metrics; no reward and no agent loop may report others under them."""


PROMPT_TOO_LONG = "prompt_too_long"
"""Code of the failure of an episode whose prompt leaves no room in the context: its row is skipped and counted."""


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The model ended a turn without calling a tool."""
    FINAL_TOOL = "final_tool"
    """A tool declared the episode over, such as `return_final_answer`."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The context or the token budget is full."""
    FAILED = "failed"
    """Something other than the model broke; `Episode.failure` says what."""


class CallOutcome(StrEnum):
    """What became of one attempted tool call."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNKNOWN_TOOL = "unknown_tool"
    SCHEMA_VIOLATION = "schema_violation"
    TRUNCATED = "truncated"
    """The turn ended inside the call."""
    TOOL_ERROR = "tool_error"
    """The tool told the model that its request cannot be met (`ToolError`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One attempted tool call and what the model was told."""

    turn: int
    name: str
    """Empty when the attempt could not be read far enough to know."""
    raw: str
    """What the model wrote between the call's markers."""
    arguments: Mapping[str, Json] | None
    outcome: CallOutcome
    text: str
    """The observation the model saw."""
    data: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """What the tool recorded for the reward; the model never saw it."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion of the model: where its tokens lie and what they say."""

    index: int
    row: int
    start: int
    """First sampled token in the row."""
    end: int
    """One past the last sampled token."""
    text: str
    finish_reason: str
    """The engine's word: `stop`, `length` or `abort`."""
    engine: str
    policy: str
    """`PolicyVersion.name` that the engine said it used."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence to train on."""

    token_ids: array[int]
    mask: bytes
    """1 on sampled tokens, 0 elsewhere."""
    logprobs: array[float]
    """Behaviour log-probabilities where the mask is 1, 0.0 elsewhere."""
    policies: Sequence[str]
    """Per turn in order, the policy name that sampled it: the versions of this row's tokens."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"a row's arrays differ in length: {len(self.token_ids)} ids, {len(self.mask)} mask, {len(self.logprobs)} log-probs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at a scenario."""

    id: str
    group_id: str
    scenario_id: str
    index: int
    """Position in its group."""
    seed: int
    rows: Sequence[Row]
    turns: Sequence[Turn]
    tool_calls: Sequence[ToolCall]
    messages: Sequence[Mapping[str, Json]]
    """The conversation as text, for people and judges; training reads only `rows`."""
    stop_reason: StopReason
    failure: Failure | None
    policy: PolicyVersion | None
    """The version asked for; None means the base model without an adapter."""
    engine: str
    started_at: float
    """Unix seconds."""
    seconds: float
    trace_id: str = ""
    reward: float | None = None
    """None until judged, and for ever if judging failed."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Each reward component before weighting."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    loop_reward: float | None = None
    """What the agent loop returned, if anything; the rule `loop_reward` makes it a component of the reward."""

    environments: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """The final state of each environment that has a `state()`, by its name."""

    @property
    def final_text(self) -> str:
        """What the model wrote in its last turn."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(row.mask) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one scenario: the unit of work, of relative scoring and of advantage."""

    id: str
    scenario: Scenario
    episodes: Sequence[Episode]
