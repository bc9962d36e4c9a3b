"""Cross-field rules of rewards by a judge model."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl.spec.job import JobSpec
from kestrl.spec.judges import JudgeBudget, RulerSpec
from kestrl.spec.problems import Problem
from kestrl.spec.scalars import format_duration


def judge_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of the ruler and of what surrounds it."""
    rulers = [(index, reward.ruler) for index, reward in enumerate(spec.rewards) if reward.ruler is not None]
    for index, _ in rulers[1:]:
        yield Problem(f"spec.rewards[{index}].ruler", "is the second ruler; keep one, and name another judge as second")
    for index, ruler in rulers:
        path = f"spec.rewards[{index}].ruler"
        if spec.rewards[index].config:
            yield Problem(f"spec.rewards[{index}].config", "a ruler takes no config; use the fields of `ruler`")
        yield from _endpoint(ruler, path)
        yield from _limits(ruler, spec, path)
        yield from _budget(ruler, path)
        rules = [reward.rule for reward in spec.rewards if reward.rule is not None]
        if ruler.gate is not None and ruler.gate.rule not in rules:
            yield Problem(
                f"{path}.gate.rule",
                f"{ruler.gate.rule!r} is not a rule of this job ({', '.join(rules) or 'it has none'}); add it to "
                "rewards, with weight 0 if it is only the gate",
            )


def _endpoint(ruler: RulerSpec, path: str) -> Iterator[Problem]:
    if ruler.job_model:
        given = {"baseUrl": ruler.base_url, "model": ruler.model, "secretRef": ruler.secret_ref, "price": ruler.price}
        for name, value in given.items():
            if value is not None:
                yield Problem(
                    f"{path}.{name}", "is not used with `self: true`, the job's own model; remove one of them"
                )
    elif ruler.base_url is None:
        yield Problem(
            f"{path}.baseUrl",
            "is missing; give baseUrl and model of an OpenAI-compatible server, or `self: true` for the job's own "
            "base model",
        )
    elif ruler.model is None:
        yield Problem(f"{path}.model", "is missing; give the name of the judge model on the server")


def _limits(ruler: RulerSpec, spec: JobSpec, path: str) -> Iterator[Problem]:
    if ruler.request_timeout > ruler.timeout:
        yield Problem(
            f"{path}.requestTimeout",
            f"{format_duration(ruler.request_timeout)} is above timeout ({format_duration(ruler.timeout)}), which "
            "bounds all requests of a group; lower it or raise timeout",
        )
    group = spec.rollout.deadlines.group
    if group is not None and ruler.timeout >= group:
        yield Problem(
            f"{path}.timeout",
            f"{format_duration(ruler.timeout)} does not fit rollout.deadlines.group ({format_duration(group)}), which "
            "includes scoring; lower it or raise the deadline",
        )


def _budget(ruler: RulerSpec, path: str) -> Iterator[Problem]:
    if ruler.budget == JudgeBudget() or ruler.budget.cost is None:
        return
    if ruler.price is None and not ruler.job_model:
        yield Problem(f"{path}.budget.cost", "needs `price`, from which a cost is computed; give it, or limit tokens")
    if ruler.second is not None and ruler.second.price is None:
        yield Problem(f"{path}.budget.cost", "needs `second.price`, too; give it, or limit tokens")
    if ruler.job_model and ruler.second is None:
        yield Problem(f"{path}.budget.cost", "the job's own model costs nothing; limit calls or tokens, or remove it")
