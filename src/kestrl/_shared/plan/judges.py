"""The judge of a job: its rules, and its judge model with the secrets and servers that it needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, SecretKey
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.common import FILE
from kestrl._shared.plan.settings.judge import JudgeEntry, JudgeModel, RewardEntry, RulerEntry
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.judges import CorrectnessSpec, JudgeSpec, Price, RulerSpec, SecondJudge
from kestrl.episode import BASE_MODEL_NAME

KEY_VARIABLES = ("KESTRL_JUDGE_KEY_0", "KESTRL_JUDGE_KEY_1")
"""Variables of the API keys of the ruler's first and second model. Processes of rewards get no variable with this
prefix."""
CORRECTNESS_KEY_VARIABLES = ("KESTRL_JUDGE_KEY_2", "KESTRL_JUDGE_KEY_3")
"""As `KEY_VARIABLES`, of the correctness judge."""
REPLY_SHARE = 4
"""The reply of the job's own model has at most this part of its context: a quarter."""


def reward_entries(spec: JobSpec) -> tuple[RewardEntry, ...]:
    """The rules, as settings of the judge."""
    return tuple(
        RewardEntry(
            name=reward.rule.rpartition(":")[2] or reward.rule,
            rule=reward.rule,
            config=reward.config,
            weight=reward.weight,
            seconds=reward.timeout,
            field=f"spec.rewards[{index}].rule",
            asks_judge=reward.correctness is not None,
        )
        for index, reward in enumerate(spec.rewards)
        if reward.rule is not None
    )


def ruler_of(spec: JobSpec) -> tuple[int, RulerSpec] | None:
    """The ruler with its position in `rewards`, or None."""
    return next(((index, reward.ruler) for index, reward in enumerate(spec.rewards) if reward.ruler is not None), None)


def correctness_of(spec: JobSpec) -> tuple[int, CorrectnessSpec] | None:
    """The correctness judge with the position of its rule in `rewards`, or None."""
    judges = ((index, reward.correctness) for index, reward in enumerate(spec.rewards))
    return next(((index, judge) for index, judge in judges if judge is not None), None)


class PlacedJudge(NamedTuple):
    """A judge of a job."""

    judge: JudgeSpec
    field: str
    """Manifest field, for messages."""
    keys: tuple[str, str]
    """Variables of the API keys of its first and second model."""


def judges_of(spec: JobSpec) -> Iterator[PlacedJudge]:
    """All judges of a job: the ruler, and the correctness judge."""
    for indexed_judge, name, keys in (
        (ruler_of(spec), "ruler", KEY_VARIABLES),
        (correctness_of(spec), "correctness", CORRECTNESS_KEY_VARIABLES),
    ):
        if indexed_judge is not None:
            index, judge = indexed_judge
            yield PlacedJudge(judge, f"spec.rewards[{index}].{name}", keys)


def judge_keys(spec: JobSpec) -> Mapping[str, SecretKey]:
    """Variables with API keys of judge models, by name."""
    keys: dict[str, SecretKey] = {}
    for placed in judges_of(spec):
        models = ((placed.judge, placed.field), (placed.judge.second, f"{placed.field}.second"))
        for variable, (model, field) in zip(placed.keys, models, strict=True):
            if model is not None and model.secret_ref is not None:
                keys[variable] = SecretKey(model.secret_ref.name, model.secret_key, f"{field}.secretRef")
    return keys


def judge_servers(spec: JobSpec) -> tuple[RemoteServer, ...]:
    """Servers of judge models outside the job."""
    servers: list[RemoteServer] = []
    for placed in judges_of(spec):
        for model, field in ((placed.judge, placed.field), (placed.judge.second, f"{placed.field}.second")):
            if model is not None and model.base_url is not None:
                servers.append(server_at(model.base_url, f"{field}.baseUrl"))
    return tuple(servers)


def uses_own_engines(spec: JobSpec) -> bool:
    """Whether a judge asks the job's engines."""
    return any(placed.judge.job_model for placed in judges_of(spec))


def ruler_entry(spec: JobSpec, engine_urls: tuple[str, ...]) -> RulerEntry | None:
    """The ruler, as settings of the judge.

    Args:
        spec: The job.
        engine_urls: URLs of the job's engines.
    """
    indexed_ruler = ruler_of(spec)
    if indexed_ruler is None:
        return None
    index, ruler = indexed_ruler
    gate = ruler.gate
    return RulerEntry(
        **_bounds(ruler, spec),
        field=f"spec.rewards[{index}].ruler",
        judges=_judges(ruler, engine_urls, KEY_VARIABLES),
        weight=spec.rewards[index].weight,
        rubric=ruler.rubric,
        gate=None if gate is None else gate.rule,
        gate_minimum=1.0 if gate is None else gate.minimum,
        permutations=ruler.permutations,
        show_reasoning=ruler.reasoning == "show",
    )


def correctness_entry(spec: JobSpec, engine_urls: tuple[str, ...]) -> JudgeEntry | None:
    """The correctness judge, as settings of the judge.

    Args:
        spec: The job.
        engine_urls: URLs of the job's engines.
    """
    indexed_judge = correctness_of(spec)
    if indexed_judge is None:
        return None
    index, judge = indexed_judge
    return JudgeEntry(
        **_bounds(judge, spec),
        field=f"spec.rewards[{index}].correctness",
        judges=_judges(judge, engine_urls, CORRECTNESS_KEY_VARIABLES),
    )


def _bounds(judge: JudgeSpec, spec: JobSpec) -> dict[str, Any]:
    reply, prompt = judge.max_reply_tokens, judge.max_prompt_tokens
    if judge.job_model:
        context = spec.inference.context_length
        reply = min(reply, context // REPLY_SHARE)
        prompt = min(prompt, context - reply)
    return {
        "structured_output": judge.structured_output,
        "max_prompt_tokens": prompt,
        "max_reply_tokens": reply,
        "concurrency": judge.concurrency,
        "request_seconds": judge.request_timeout,
        "seconds": judge.timeout,
        "budget_calls": judge.budget.calls,
        "budget_tokens": judge.budget.tokens,
        "budget_cost": judge.budget.cost,
    }


def _judges(judge: JudgeSpec, engine_urls: tuple[str, ...], keys: tuple[str, str]) -> tuple[JudgeModel, ...]:
    first = _own_model(judge, engine_urls) if judge.job_model else _remote(judge, keys[0], judge.temperature)
    return (first,) if judge.second is None else (first, _remote(judge.second, keys[1], judge.temperature))


def _own_model(judge: JudgeSpec, engine_urls: tuple[str, ...]) -> JudgeModel:
    return JudgeModel(
        model=BASE_MODEL_NAME,
        base_urls=tuple(f"{url}{'#' if url.startswith(FILE) else ''}/v1" for url in engine_urls),
        key_variable=Secret.ENGINE_KEY.value,
        strict_schema=True,
        temperature=0.0 if judge.temperature is None else judge.temperature,
    )


def _remote(judge: JudgeSpec | SecondJudge, key: str, temperature: float | None) -> JudgeModel:
    price = judge.price or Price(input=0.0, output=0.0)
    return JudgeModel(
        model=judge.model or "",
        base_urls=(judge.base_url or "",),
        key_variable=None if judge.secret_ref is None else key,
        temperature=temperature,
        input_price=price.input,
        output_price=price.output,
    )


def with_judge_secrets(component: Component, spec: JobSpec) -> Component:
    """The judge with what its judge model needs, and nothing if the job names none."""
    own_secrets = (Secret.ENGINE_KEY,) if uses_own_engines(spec) else ()
    return replace(component, own_secrets=own_secrets, user_secrets=judge_keys(spec))
