"""Rules about the `config` of built-in rewards: pure functions from a spec to problems, each with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl.rewards.boxed import Comparison, Shaping

Found = Iterator[tuple[str, str]]
"""Members of a config and what is wrong with them."""


def reward_config_problems(spec: JobSpec) -> Iterator[Problem]:
    for index, reward in enumerate(spec.rewards):
        check = _CHECKS.get(reward.rule or "")
        for member, message in check(reward.config) if check is not None else ():
            yield Problem(f"spec.rewards[{index}].config.{member}", message)


def _overlong(config: Mapping[str, Any]) -> Found:
    names = ("max_tokens", "buffer")
    yield from _unknown(config, names, "overlong")
    problems = [*_counts(config, names, required=True)]
    yield from problems
    if not problems and config["buffer"] > config["max_tokens"]:
        yield "buffer", f"{config['buffer']} is above max_tokens ({config['max_tokens']}); lower it"


def _boxed_answer(config: Mapping[str, Any]) -> Found:
    yield from _unknown(config, ("compare", "shaping", "window"), "boxed_answer")
    for name, choices in (("compare", get_args(Comparison)), ("shaping", get_args(Shaping))):
        if name in config and config[name] not in choices:
            yield name, f"{config[name]!r} is not one of {', '.join(choices)}"
    yield from _counts(config, ("window",))


def _environment_reward(config: Mapping[str, Any]) -> Found:
    yield from _unknown(config, ("weights",), "environment_reward")
    weights: Any = config.get("weights", {})
    if not isinstance(weights, dict):
        yield "weights", "must be an object with a number for each part of the environment's reward"
        return
    for name, weight in cast("dict[str, Any]", weights).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            yield f"weights.{name}", f"must be a number, is {weight!r}"


def _unknown(config: Mapping[str, Any], names: tuple[str, ...], rule: str) -> Found:
    for name in config:
        if name not in names:
            yield name, f"{rule} takes no {name}; it takes {', '.join(names)}"


def _counts(config: Mapping[str, Any], names: tuple[str, ...], *, required: bool = False) -> Found:
    for name in names:
        value = config.get(name)
        if name not in config:
            if required:
                yield name, "is required; add it"
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield name, f"must be a whole number from 1, is {value!r}"


_CHECKS: dict[str, Callable[[Mapping[str, Any]], Found]] = {
    "overlong": _overlong,
    "boxed_answer": _boxed_answer,
    "environment_reward": _environment_reward,
}
