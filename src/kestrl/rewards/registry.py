"""The built-in rewards by their names in a manifest. Checks, messages and the reference take them from this list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from kestrl.rewards import Score
from kestrl.rewards.boxed import Comparison, Shaping
from kestrl.rewards.builtin import (
    boxed_answer,
    environment_reward,
    exact_answer,
    flexible_answer,
    loop_reward,
    math_answer,
    overlong,
    tool_format,
)
from kestrl.tools.shapes import is_mapping


class RewardConfig(BaseModel):
    """Base of the `config` of a reward: the keyword arguments of its function."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _count(argument: object) -> object:
    if isinstance(argument, bool) or not isinstance(argument, int) or argument < 1:
        raise ValueError(f"must be a whole number from 1, is {argument!r}")
    return argument


def _one_of(choices: tuple[str, ...]) -> BeforeValidator:
    def check(argument: object) -> object:
        if argument not in choices:
            raise ValueError(f"{argument!r} is not one of {', '.join(choices)}")
        return argument

    return BeforeValidator(check)


def _weight(argument: object) -> object:
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        raise ValueError(f"must be a number, is {argument!r}")
    return argument


def _weights(argument: object) -> object:
    if not is_mapping(argument):
        raise ValueError("must be an object with a number for each part of the environment's reward")
    return argument


Count = Annotated[int, BeforeValidator(_count)]


class BoxedAnswerConfig(RewardConfig):
    """Arguments of `boxed_answer`."""

    compare: Annotated[Comparison, _one_of(get_args(Comparison))] = "exact"
    shaping: Annotated[Shaping, _one_of(get_args(Shaping))] = "none"
    window: Count = 300


class EnvironmentRewardConfig(RewardConfig):
    """Arguments of `environment_reward`."""

    weights: Annotated[dict[str, Annotated[float, BeforeValidator(_weight)]], BeforeValidator(_weights)] = {}


class OverlongConfig(RewardConfig):
    """Arguments of `overlong`."""

    max_tokens: Count
    buffer: Count

    @field_validator("buffer")
    @classmethod
    def _fits(cls, buffer: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens", buffer)
        if buffer > max_tokens:
            raise ValueError(f"{buffer} is above max_tokens ({max_tokens}); lower it")
        return buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInReward:
    """A reward that a manifest names without an import path."""

    function: Callable[..., Score]
    summary: str = ""
    """What its name does not say, for the reference."""
    config: type[RewardConfig] | None = None
    """None if it takes no `config`."""
    compares: bool = False
    """Whether it compares with the ground truth of a row, so that rows need one."""
    mathematical: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Whether it needs math-verify with a `config`."""


BUILT_IN: Mapping[str, BuiltInReward] = {
    "exact_answer": BuiltInReward(function=exact_answer, compares=True),
    "flexible_answer": BuiltInReward(function=flexible_answer, compares=True),
    "math_answer": BuiltInReward(function=math_answer, compares=True, mathematical=lambda _: True),
    "boxed_answer": BuiltInReward(
        function=boxed_answer,
        config=BoxedAnswerConfig,
        compares=True,
        mathematical=lambda config: config.get("compare") == "math",
    ),
    "format": BuiltInReward(function=tool_format),
    "loop_reward": BuiltInReward(function=loop_reward, summary="what the agent loop returns"),
    "environment_reward": BuiltInReward(
        function=environment_reward, summary="the environment's own", config=EnvironmentRewardConfig
    ),
    "overlong": BuiltInReward(function=overlong, config=OverlongConfig),
}
