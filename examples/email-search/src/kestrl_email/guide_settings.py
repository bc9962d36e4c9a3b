"""The environment variables of the quick-training guide (rl-qwen3), as options of `kestrl`.

`kestrl run quick.yaml $(kestrl email settings)` takes those that are set; docs/email-agent.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kestrl.errors import UserInputError


class Command(StrEnum):
    """Commands that take the options."""

    RUN = "run"
    EVAL = "eval"
    BENCH = "bench"


ALL = frozenset(Command)
EVALUATING = frozenset({Command.EVAL, Command.BENCH})


def _count(value: str) -> str:
    number = int(value)
    if number < 1:
        raise ValueError("must be at least 1")
    return str(number)


def _rate(value: str) -> str:
    if float(value) <= 0:
        raise ValueError("must be above 0")
    return value


def _switch(value: str) -> bool:
    if value.lower() in {"true", "1", "yes"}:
        return True
    if value.lower() in {"false", "0", "no", ""}:
        return False
    raise ValueError("must be true or false")


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the guide."""

    name: str
    option: str
    """The option, with `{}` for the value."""
    convert: Callable[[str], str | bool]
    commands: frozenset[Command] = ALL


VARIABLES = (
    Variable("TRAINING_DATASET_SIZE", "--set data.train.size={}", _count, frozenset({Command.RUN})),
    Variable("VAL_SET_SIZE", "--set data.validation.size={}", _count, frozenset({Command.RUN})),
    Variable("TEST_SET_SIZE", "--set data.validation.size={}", _count, EVALUATING),
    Variable("TRAJECTORIES_PER_GROUP", "--set algorithm.groupSize={}", _count, frozenset({Command.RUN})),
    Variable("GROUPS_PER_STEP", "--set algorithm.groupsPerStep={}", _count, frozenset({Command.RUN})),
    Variable("LEARNING_RATE", "--set algorithm.learningRate={}", _rate, frozenset({Command.RUN})),
    Variable("EVAL_STEPS", "--set schedule.evalEvery={}", _count, frozenset({Command.RUN})),
    Variable("NUM_EPOCHS", "--set schedule.epochs={}", _count, frozenset({Command.RUN})),
    Variable("MAX_TURNS", "--set agent.maxTurns={}", _count),
    Variable("MAX_TOKENS", "--set agent.maxTokens={}", _count),
    Variable("LITELLM_TIMEOUT", "--set rollout.deadlines.turn={}s", _count),
    Variable("ROLLOUT_CONCURRENCY", "--set rollout.concurrency={}", _count),
    Variable("BENCH_SEQUENTIAL", "--sequential", _switch, EVALUATING),
    Variable("SHOW_TRAJECTORY_DETAILS", "--details", _switch, EVALUATING),
    Variable("VERBOSE", "--verbose", _switch),
)


def options(environment: Mapping[str, str], command: Command) -> list[str]:
    """Options for the variables that are set, as words of a command line.

    Raises:
        UserInputError: A variable has a value that it cannot have.
    """
    words: list[str] = []
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if value is None or command not in variable.commands:
            continue
        try:
            converted = variable.convert(value)
        except ValueError as error:
            raise UserInputError(f"{variable.name}={value}: {error}") from error
        if converted is not False:
            words += variable.option.format(converted).split()
    return words
