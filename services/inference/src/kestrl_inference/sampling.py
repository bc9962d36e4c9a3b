"""Draws tokens of an engine that has started, to see whether it samples from the policy's distribution."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kestrl._shared.telemetry import unrecorded
from kestrl.errors import Boundary, Failure
from kestrl_inference.draws import ExploringDraw, fault
from kestrl_inference.engine import Engine

CODE = "sampling_differs"
EXPLORING = 32
"""Draws that are scored."""
EXPLORED_TOKENS = 4
"""Tokens of each of them."""
EXPLORING_AT_ONCE, AT_ONCE = 8, 32
"""Draws at a time."""
SEED = 20_240_229
ADVICE = (
    "look for what changes sampling in this engine: logits processors, generation defaults, speculative decoding, a "
    "plugin or a worker class"
)
Answer = TypeVar("Answer")


async def sampling_failure(
    engine: Engine, name: str, policy: str, prompt_ids: Sequence[int], *, draws: int, seconds: float, bound: float
) -> Failure | None:
    """Why an engine does not sample from the distribution of a policy that it has been proved to score; None if it
    does.

    Args:
        engine: The engine.
        name: Its name, for messages.
        policy: Name of the policy.
        prompt_ids: Prompt of the draws.
        draws: Largest number of tokens that are counted.
        seconds: Time after which no further ones are drawn, on a slow engine.
        bound: Largest accepted difference of log-probs in nats.

    Raises:
        EngineFailure: The engine did not answer, or in a form that is not known.
    """
    seeds = random.Random(SEED)  # noqa: S311 - recorded on purpose

    async def explore(seed: int) -> ExploringDraw:
        turn = await engine.sample(policy, prompt_ids, seed=seed, max_tokens=EXPLORED_TOKENS)
        scores = await engine.score(policy, [*prompt_ids, *turn.token_ids])
        return ExploringDraw(token_ids=turn.token_ids, logprobs=turn.logprobs, scores=scores[-len(turn.token_ids) :])

    async def draw(seed: int) -> int:
        return (await engine.sample(policy, prompt_ids, seed=seed)).token_ids[0]

    exploring_seeds, counted_seeds = ([seeds.getrandbits(63) for _ in range(count)] for count in (EXPLORING, draws))
    began = time.monotonic()
    with unrecorded():
        exploring = await _in_rounds(explore, exploring_seeds, EXPLORING_AT_ONCE, began + seconds / 2)
        counted = await _in_rounds(draw, counted_seeds, AT_ONCE, began + seconds)
    problem = fault(exploring, counted, bound)
    if not problem:
        return None
    message = f"{name} does not sample from the distribution of {policy}: {problem}; {ADVICE}"
    return Failure(boundary=Boundary.ENGINE, code=CODE, message=message, component=name)


async def _in_rounds(
    call: Callable[[int], Coroutine[Any, Any, Answer]], seeds: Sequence[int], size: int, deadline: float
) -> list[Answer]:
    """Answers of a call for each seed, some at a time; after the deadline no further round begins.

    When it ends depends on the time alone and not on the answers, so that these are no selection.
    """
    answers: list[Answer] = []
    for start in range(0, len(seeds), size):
        if answers and time.monotonic() > deadline:
            break
        answers += await _together(call, seeds[start : start + size])
    return answers


async def _together(call: Callable[[int], Coroutine[Any, Any, Answer]], seeds: Sequence[int]) -> list[Answer]:
    """Answers of a call for each seed; a failure ends all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(seed)) for seed in seeds]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
