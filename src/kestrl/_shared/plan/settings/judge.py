"""Settings of the judge."""

from __future__ import annotations

from typing import Any, Literal

from kestrl._shared.plan.settings.common import ServiceSettings, SettingsModel


class RewardEntry(SettingsModel):
    """One rule reward of the manifest."""

    name: str
    rule: str
    """Import path of a function, or the name of a built-in."""
    config: dict[str, Any] = {}
    weight: float = 1.0
    seconds: float = 10.0
    """Time limit for one episode in seconds."""
    field: str = "spec.rewards[0].rule"
    """Manifest field, for messages."""
    asks_judge: bool = False
    """Whether it may ask the correctness judge."""


class JudgeModel(SettingsModel):
    """A judge model behind an OpenAI-compatible endpoint."""

    model: str
    base_urls: tuple[str, ...]
    """Base URLs of equal servers, used in turn."""
    key_variable: str | None = None
    """Environment variable with the API key."""
    strict_schema: bool = False
    """Whether the server enforces every keyword of a schema, as engines of a job do."""
    temperature: float | None = None
    input_price: float = 0.0
    """US dollars per million tokens of prompts."""
    output_price: float = 0.0
    """US dollars per million tokens of replies."""


class JudgeEntry(SettingsModel):
    """Judge models of the manifest, and the bounds on their use."""

    field: str = "spec.rewards[0].ruler"
    """Manifest field, for messages."""
    judges: tuple[JudgeModel, ...]
    """Judges in the order in which they are asked."""
    structured_output: Literal["json_schema", "json_object", "none"] = "json_schema"
    max_prompt_tokens: int = 32_768
    max_reply_tokens: int = 4096
    concurrency: int = 8
    request_seconds: float = 60.0
    seconds: float = 300.0
    """Time limit of one group."""
    budget_calls: int | None = None
    budget_tokens: int | None = None
    budget_cost: float | None = None
    """US dollars."""


class RulerEntry(JudgeEntry):
    """The ruler of the manifest."""

    weight: float = 1.0
    rubric: str | None = None
    gate: str | None = None
    """Name of the component that gates the ruler."""
    gate_minimum: float = 1.0
    permutations: int = 1
    show_reasoning: bool = False


class JudgeSettings(ServiceSettings):
    """The judge."""

    rewards: tuple[RewardEntry, ...]
    processes: int = 1
    """Processes per reward."""
    ruler: RulerEntry | None = None
    correctness: JudgeEntry | None = None
    """The judge models that decide whether an answer is correct."""
    state_dir: str | None = None
    """Folder of the journal of judge calls, from which a restarted judge continues; None keeps it in memory."""
