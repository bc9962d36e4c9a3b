"""The models of a `ruler` reward: a language model that scores the episodes of a group relative to each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kestrl._shared.spec.model import LARGEST_CONTEXT, Model, NonNegative, Positive, PositiveInt
from kestrl._shared.spec.scalars import BaseUrl, Duration
from kestrl._shared.spec.secrets import SecretRef, VariableName

ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class Price(Model):
    """Price of a judge model in US dollars."""

    input: NonNegative
    """Dollars per million tokens of prompts."""
    output: NonNegative
    """Dollars per million tokens of replies."""


class SecondJudge(Model):
    """A judge model that is asked when the first one gave no valid scores."""

    base_url: BaseUrl
    """Base URL of an OpenAI-compatible server, such as https://api.openai.com/v1."""
    model: ModelName
    """Model name on the server."""
    secret_ref: SecretRef | None = None
    """Secret with the API key. Default: no key is sent."""
    secret_key: VariableName = "OPENAI_API_KEY"  # noqa: S105 - a name
    """Entry of the secret that holds the API key."""
    price: Price | None = None


class JudgeBudget(Model):
    """Bounds on what a judge may use in one run; groups after that are unscored."""

    calls: PositiveInt | None = None
    """Maximum number of answered requests. Default: no limit."""
    tokens: PositiveInt | None = None
    """Maximum number of tokens, of prompts and replies together. Default: no limit."""
    cost: Positive | None = None
    """Maximum cost in US dollars by the prices given. Default: no limit."""


class Gate(Model):
    """A rule that an episode must satisfy before the judge sees it; other episodes score 0."""

    rule: Annotated[str, Field(min_length=1)]
    """The rule, as in another entry of `rewards`."""
    minimum: Annotated[float, Field(strict=False)] = 1.0
    """Smallest reward of the rule that passes."""


class JudgeSpec(Model):
    """A judge model, and the bounds on its use."""

    base_url: BaseUrl | None = None
    """Base URL of an OpenAI-compatible server, such as https://api.openai.com/v1."""
    model: ModelName | None = None
    """Model name on the server."""
    secret_ref: SecretRef | None = None
    """Secret with the API key; on one machine the file `NAME.env` beside the manifest. Default: no key is sent."""
    secret_key: VariableName = "OPENAI_API_KEY"  # noqa: S105 - a name
    """Entry of the secret that holds the API key."""
    job_model: Annotated[bool, Field(alias="self")] = False
    """Whether the judge is the job's own base model, on its engines, without an adapter."""
    price: Price | None = None
    second: SecondJudge | None = None
    """Judge that is asked when this one gave no valid reply."""
    structured_output: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the server is asked for JSON: its `response_format`. Replies are checked in any case."""
    temperature: Annotated[float, Field(ge=0, le=2, strict=False)] | None = None
    """Temperature of the judge. Default: the server's, and 0 for the job's own model."""
    max_prompt_tokens: Annotated[int, Field(ge=256, le=LARGEST_CONTEXT)] = 32_768
    """Maximum estimated tokens of a prompt; a longer group is shortened from its beginning, with a notice."""
    max_reply_tokens: Annotated[int, Field(ge=64, le=LARGEST_CONTEXT)] = 4096
    """Maximum tokens of a reply."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum concurrent requests; lowered while the server answers 429."""
    request_timeout: Duration = 60.0
    """Time limit of one request."""
    timeout: Duration = 300.0
    """Time limit of scoring one group, with all requests; what is not scored then is unscored."""
    budget: JudgeBudget = JudgeBudget()


class RulerSpec(JudgeSpec):
    """A language-model judge that scores the episodes of a group relative to each other, from 0 to 1 (RULER)."""

    rubric: Annotated[str, Field(min_length=1, max_length=20_000)] | None = None
    """Grading standards. Default: achieving the goal first, then efficiency, with partial credit."""
    gate: Gate | None = None
    permutations: Annotated[int, Field(ge=1, le=16)] = 1
    """Requests for each group, each in another order; a score is the mean of them."""
    reasoning: Literal["hide", "show"] = "hide"
    """Whether the judge sees the reasoning of the agent, which can persuade it of what did not happen."""


class CorrectnessSpec(JudgeSpec):
    """A language-model judge that decides whether an answer states what an accepted answer does."""
