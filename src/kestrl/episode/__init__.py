"""Domain data: scenarios, episodes as exact tokens, and groups.

Frozen data shared by every process. Token sequences are `array`s, so that light services need no numpy:
ids are C ints (`'i'`), log-probabilities C floats (`'f'`), masks bytes of 0 and 1. All three have the same length in a
row.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kestrl.errors import Failure

Json = Any
"""A JSON value: str, int, float, bool, None, or a list or dict of JSON values."""

BASE_MODEL_NAME = "base"
"""Name of the base model in every engine; adapters are served as `PolicyVersion.name`."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """An immutable LoRA adapter. Never overwritten, never reused."""

    job: str
    step: int
    """Optimiser steps so far; 0 is the initial adapter, which equals the base model."""
    sha256: str
    """Digest of the adapter's weights, 64 hex digits."""

    @property
    def name(self) -> str:
        """Name in the engines: unique to the weights, so that no cache can mix two versions."""
        return f"{self.job}.{self.step}.{self.sha256[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One task to attempt."""

    id: str
    ordinal: int
    """Position in the data set, from 0; the ledger accounts for every ordinal of every epoch."""
    messages: Sequence[Mapping[str, str]]
    """The prompt: `{"role": "system"|"user"|"assistant"|"tool", "content": text}` each."""
    tools: Sequence[str] | None = None
    """Names of the offered tools; None means every tool of the job."""
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Json]]] = field(default_factory=dict[str, Any])
    """Per tool: `create_kwargs` for the episode's instance, `execute_kwargs` merged into every call. The entry of an
    environment has the environment's name. Hidden from the model."""
    agent: str = ""
    """Name of the agent loop; empty for the job's default."""
    ground_truth: Json = None
    """Expected answer, for rewards. Never shown to the model."""
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Any])


LARGEST_REWARD = 1e30
"""Maximum magnitude of a reward: far below the range of float32, also for sums over a group."""


RESERVED_METRICS = frozenset(
    {
        "reward",
        "step",
        "episodes",
        "duration",
        "loss",
        "grad_norm",
        "gap",
        "gathered",
        "idle_groups",
        "staleness",
        "seconds",
    }
)
"""Names of metrics that the learner computes; rewards and agent loops must not report metrics with these names."""


PROMPT_TOO_LONG = "prompt_too_long"
"""Failure code of an episode whose prompt does not fit the context; the row is skipped and counted."""
ACT = "act"
"""Method of an adapter of environments that takes the turns of the model that call no tool."""
ENVIRONMENT_REWARD = "get_reward"
"""Method that returns an environment's own reward, named so by TRL, and the reward's key in the environment's state."""
ENVIRONMENT_WEIGHTS = f"{ENVIRONMENT_REWARD}.weights"
"""Key of the weights that the environment itself gives the parts of its reward."""


UNSCORED = "unscored"
"""Failure code of an episode that a judge model could not score; its whole group is not trained on."""


class Purpose(StrEnum):
    """What an episode is run for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The model ended a turn without calling a tool."""
    FINAL_TOOL = "final_tool"
    """A tool ended the episode, such as `return_final_answer`."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The context or the token budget is full."""
    AGENT_LIMIT = "agent_limit"
    """A limit of the agent's own ended the run, such as LangGraph's limit of recursion."""
    MODEL_BEHAVIOR = "model_behavior"
    """The agent gave up on what the model wrote, such as a call that its framework cannot read."""
    FAILED = "failed"
    """Something other than the model failed; see `Episode.failure`."""


class CallOutcome(StrEnum):
    """Outcome of an attempted tool call."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNKNOWN_TOOL = "unknown_tool"
    SCHEMA_VIOLATION = "schema_violation"
    TRUNCATED = "truncated"
    """The turn ended inside the call."""
    TOOL_ERROR = "tool_error"
    """The tool refused the request with a message for the model (`ToolError`)."""
    UNANSWERED = "unanswered"
    """The agent, which runs its tools itself, sent no result of the call: it did not make it, or it ended with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """An attempted tool call and its result."""

    turn: int
    name: str
    """Name of the tool; empty when it could not be read."""
    raw: str
    """Text between the markers of the call."""
    arguments: Mapping[str, Json] | None
    outcome: CallOutcome
    text: str
    """Observation for the model."""
    data: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Facts of the tool for rewards; never shown to the model."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion of the model: position of its tokens and their text."""

    index: int
    row: int
    start: int
    """First sampled token in the row."""
    end: int
    """One past the last sampled token."""
    text: str
    finish_reason: str
    """Reported by the engine: `stop`, `length` or `abort`."""
    engine: str
    policy: str
    """`PolicyVersion.name` reported by the engine."""
    seconds: float
    reasoning_opened: bool = False
    """Whether the prompt had opened the model's reasoning. `text` then begins with the tag that the prompt holds."""
    seed: int = 0
    """Sampling seed of the call, unique in its episode; 0 if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence to train on."""

    token_ids: array[int]
    mask: bytes
    """1 on sampled tokens, 0 elsewhere."""
    logprobs: array[float]
    """Behaviour log-probabilities where the mask is 1, 0.0 elsewhere."""
    policies: Sequence[str]
    """Name of the policy that sampled each turn, in order."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"a row's arrays differ in length: {len(self.token_ids)} ids, {len(self.mask)} mask, "
                f"{len(self.logprobs)} log-probs"
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
    """The conversation of the main row as text, for people and judges; training only uses `rows`."""
    stop_reason: StopReason
    failure: Failure | None
    policy: PolicyVersion | None
    """Requested version, with which the episode began; None means the base model without an adapter. Each turn names
    its own."""
    engine: str
    started_at: float
    """Unix seconds."""
    seconds: float
    trace_id: str = ""
    reward: float | None = None
    """None before scoring, and if scoring failed."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Reward components before weighting."""
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each component of `rewards`, by name; empty in episodes that were stored without weights."""
    turn_rewards: Sequence[float] = ()
    """Weighted reward of each turn, in order, included in `reward`; empty if no component scores turns."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    loop_reward: float | None = None
    """Reward returned by the agent loop, if any; the rule `loop_reward` makes it a component of the reward."""
    answer: str | None = None
    """The answer that a reward read out of the episode, in a form that is equal for equal answers; empty if there is
    none. None if no reward reads answers."""
    environments: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Final state of each environment with a `state()` or a `get_reward()` method, by name."""
    scoring: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Component of the reward to what it reports for people, such as an explanation."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """What the run of an [agent by URL](existing-agents.md) reported for rules and people."""
    main_row: int | None = None
    """The row that carries the task; others, such as those of sub-agents, are trained with it as one episode. None if
    there is no row, or it is not known."""

    @property
    def final_text(self) -> str:
        """Text of the model's last turn in the main row."""
        turns = [turn for turn in self.turns if self.main_row is None or turn.row == self.main_row]
        return turns[-1].text if turns else ""

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
    tools: Sequence[Mapping[str, Json]] = ()
    """The offered tools as function schemas; empty unless the judge shows them."""
    scoring: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Component of the reward to how it scored the group, such as the messages sent to a judge model."""
