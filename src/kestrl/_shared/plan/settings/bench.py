"""Settings of a benchmark of a model behind an endpoint."""

from __future__ import annotations

from kestrl._shared.plan.settings.common import DataSettings, ServiceSettings, SettingsModel
from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.runstate.sampling import EvaluationSampling


class BenchEndpoint(SettingsModel):
    """A model behind an OpenAI-compatible endpoint."""

    url: str | None
    """Base URL; None for OpenAI's."""
    model: str = ""
    key_variable: str
    """Environment variable with the key."""
    budget_tokens: int | None = None
    """Tokens, prompts included, after which no request is sent; None is no limit."""
    retries: int = 4
    """Repetitions after 429, 5xx and lost connections, with back-off."""


class BenchSettings(ServiceSettings):
    """A program that runs the validation data with a model behind an endpoint, the job's tools and its rewards."""

    endpoint: BenchEndpoint
    sampling: EvaluationSampling
    data: DataSettings
    max_turns: int
    max_tokens: int
    max_tokens_per_turn: int
    max_parallel_calls: int
    max_tool_tokens: int
    deadlines: RolloutDeadlines
    concurrency: int
    tools_address: str
    judge_address: str
    storage: str
