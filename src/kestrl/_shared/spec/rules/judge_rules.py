"""Cross-field rules of rewards by a judge model."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.judges import JudgeBudget, JudgeSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.scalars import format_duration


def judge_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of judge models and of what surrounds them."""
    correctness_judges = [
        (index, reward.correctness) for index, reward in enumerate(spec.rewards) if reward.correctness is not None
    ]
    for index, _ in correctness_judges[1:]:
        yield Problem(f"spec.rewards[{index}].correctness", "is the second; one rule of a job can ask a judge model")
    for index, correctness in correctness_judges:
        yield from _judge(correctness, spec, f"spec.rewards[{index}].correctness")
    rulers = [(index, reward.ruler) for index, reward in enumerate(spec.rewards) if reward.ruler is not None]
    for index, _ in rulers[1:]:
        yield Problem(f"spec.rewards[{index}].ruler", "is the second ruler; keep one, and name another judge as second")
    for index, ruler in rulers:
        path = f"spec.rewards[{index}].ruler"
        if spec.rewards[index].config:
            yield Problem(f"spec.rewards[{index}].config", "a ruler takes no config; use the fields of `ruler`")
        yield from _judge(ruler, spec, path)
        rules = [reward.rule for reward in spec.rewards if reward.rule is not None]
        if ruler.gate is not None and ruler.gate.rule not in rules:
            yield Problem(
                f"{path}.gate.rule",
                f"{ruler.gate.rule!r} is not a rule of this job ({', '.join(rules) or 'it has none'}); add it to "
                "rewards, with weight 0 if it is only the gate",
            )


def _judge(judge: JudgeSpec, spec: JobSpec, path: str) -> Iterator[Problem]:
    yield from _endpoint(judge, path)
    yield from _limits(judge, spec, path)
    yield from _budget(judge, path)


def _endpoint(judge: JudgeSpec, path: str) -> Iterator[Problem]:
    if judge.job_model:
        fields = {"baseUrl": judge.base_url, "model": judge.model, "secretRef": judge.secret_ref, "price": judge.price}
        for name, value in fields.items():
            if value is not None:
                yield Problem(
                    f"{path}.{name}", "is not used with `self: true`, the job's own model; remove one of them"
                )
    elif judge.base_url is None:
        yield Problem(
            f"{path}.baseUrl",
            "is missing; give baseUrl and model of an OpenAI-compatible server, or `self: true` for the job's own "
            "base model",
        )
    elif judge.model is None:
        yield Problem(f"{path}.model", "is missing; give the name of the judge model on the server")


def _limits(judge: JudgeSpec, spec: JobSpec, path: str) -> Iterator[Problem]:
    if judge.request_timeout > judge.timeout:
        yield Problem(
            f"{path}.requestTimeout",
            f"{format_duration(judge.request_timeout)} is above timeout ({format_duration(judge.timeout)}), which "
            "bounds all requests of a group; lower it or raise timeout",
        )
    group = spec.rollout.deadlines.group
    if group is not None and judge.timeout >= group:
        yield Problem(
            f"{path}.timeout",
            f"{format_duration(judge.timeout)} does not fit rollout.deadlines.group ({format_duration(group)}), which "
            "includes scoring; lower it or raise the deadline",
        )


def _budget(judge: JudgeSpec, path: str) -> Iterator[Problem]:
    if judge.budget == JudgeBudget() or judge.budget.cost is None:
        return
    if judge.price is None and not judge.job_model:
        yield Problem(f"{path}.budget.cost", "needs `price`, from which a cost is computed; give it, or limit tokens")
    if judge.second is not None and judge.second.price is None:
        yield Problem(f"{path}.budget.cost", "needs `second.price`, too; give it, or limit tokens")
    if judge.job_model and judge.second is None:
        yield Problem(f"{path}.budget.cost", "the job's own model costs nothing; limit calls or tokens, or remove it")
