"""The judge of a job: its rules, and its judge model with the secrets and servers that it needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kestrl.credentials import Secret
from kestrl.episode import BASE_MODEL_NAME
from kestrl.plan.components import Component, SecretKey
from kestrl.plan.servers import RemoteServer, server_at
from kestrl.plan.settings import JudgeModel, RewardEntry, RulerEntry
from kestrl.spec.job import JobSpec
from kestrl.spec.judges import Price, RulerSpec, SecondJudge

KEY_VARIABLES = ("KESTRL_JUDGE_KEY_0", "KESTRL_JUDGE_KEY_1")
"""Variables of the API keys of the first and the second judge. Processes of rewards get no variable with this
prefix."""
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
        )
        for index, reward in enumerate(spec.rewards)
        if reward.rule is not None
    )


def ruler_of(spec: JobSpec) -> tuple[int, RulerSpec] | None:
    """The ruler with its position in `rewards`, or None."""
    return next(((index, reward.ruler) for index, reward in enumerate(spec.rewards) if reward.ruler is not None), None)


def judge_keys(spec: JobSpec) -> Mapping[str, SecretKey]:
    """Variables with API keys of judge models, by name."""
    found = ruler_of(spec)
    if found is None:
        return {}
    index, ruler = found
    keys: dict[str, SecretKey] = {}
    for variable, judge, path in zip(KEY_VARIABLES, (ruler, ruler.second), ("ruler", "ruler.second"), strict=True):
        if judge is not None and judge.secret_ref is not None:
            field = f"spec.rewards[{index}].{path}.secretRef"
            keys[variable] = SecretKey(judge.secret_ref.name, judge.secret_key, field)
    return keys


def judge_servers(spec: JobSpec) -> tuple[RemoteServer, ...]:
    """Servers of judge models outside the job."""
    found = ruler_of(spec)
    if found is None:
        return ()
    index, ruler = found
    servers: list[RemoteServer] = []
    for judge, path in ((ruler, "ruler"), (ruler.second, "ruler.second")):
        if judge is not None and judge.base_url is not None:
            servers.append(server_at(judge.base_url, f"spec.rewards[{index}].{path}.baseUrl"))
    return tuple(servers)


def uses_own_engines(spec: JobSpec) -> bool:
    """Whether the judge asks the job's engines."""
    found = ruler_of(spec)
    return found is not None and found[1].job_model


def ruler_entry(spec: JobSpec, engine_urls: tuple[str, ...]) -> RulerEntry | None:
    """The ruler, as settings of the judge.

    Args:
        spec: The job.
        engine_urls: URLs of the job's engines.
    """
    found = ruler_of(spec)
    if found is None:
        return None
    index, ruler = found
    reply, prompt = ruler.max_reply_tokens, ruler.max_prompt_tokens
    if ruler.job_model:
        context = spec.inference.context_length
        reply = min(reply, context // REPLY_SHARE)
        prompt = min(prompt, context - reply)
    gate = ruler.gate
    return RulerEntry(
        field=f"spec.rewards[{index}].ruler",
        judges=_judges(ruler, engine_urls),
        weight=spec.rewards[index].weight,
        rubric=ruler.rubric,
        gate=None if gate is None else gate.rule,
        gate_minimum=1.0 if gate is None else gate.minimum,
        permutations=ruler.permutations,
        show_reasoning=ruler.reasoning == "show",
        structured_output=ruler.structured_output,
        max_prompt_tokens=prompt,
        max_reply_tokens=reply,
        concurrency=ruler.concurrency,
        request_seconds=ruler.request_timeout,
        seconds=ruler.timeout,
        budget_calls=ruler.budget.calls,
        budget_tokens=ruler.budget.tokens,
        budget_cost=ruler.budget.cost,
    )


def _judges(ruler: RulerSpec, engine_urls: tuple[str, ...]) -> tuple[JudgeModel, ...]:
    first = _own_model(ruler, engine_urls) if ruler.job_model else _remote(ruler, 0, ruler.temperature)
    return (first,) if ruler.second is None else (first, _remote(ruler.second, 1, ruler.temperature))


def _own_model(ruler: RulerSpec, engine_urls: tuple[str, ...]) -> JudgeModel:
    return JudgeModel(
        model=BASE_MODEL_NAME,
        base_urls=tuple(f"{url}/v1" for url in engine_urls),
        key_variable=Secret.ENGINE_KEY.value,
        strict_schema=True,
        temperature=0.0 if ruler.temperature is None else ruler.temperature,
    )


def _remote(judge: RulerSpec | SecondJudge, number: int, temperature: float | None) -> JudgeModel:
    price = judge.price or Price(input=0.0, output=0.0)
    return JudgeModel(
        model=judge.model or "",
        base_urls=(judge.base_url or "",),
        key_variable=None if judge.secret_ref is None else KEY_VARIABLES[number],
        temperature=temperature,
        input_price=price.input,
        output_price=price.output,
    )


def with_judge_secrets(component: Component, spec: JobSpec) -> Component:
    """The judge with what its judge model needs, and nothing if the job names none."""
    own = (Secret.ENGINE_KEY,) if uses_own_engines(spec) else ()
    return replace(component, own_secrets=own, user_secrets=judge_keys(spec))
