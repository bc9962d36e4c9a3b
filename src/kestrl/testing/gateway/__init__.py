"""Conformance suite of gateways: 57 cases of what clients send to an episode's URL, on an engine that says what a case
wants.

A user's test calls `asyncio.run(check_gateway(subject, number))` for the numbers of `CASES` that have a program, with a
`Subject` that serves episodes. A case raises AssertionError with the property that does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from kestrl.testing.gateway import calls, histories, requests, rows
from kestrl.testing.gateway.case import Case, Table
from kestrl.testing.gateway.seam import EnginePrompt, Held, Options, Served, Subject

__all__ = ["CASES", "Case", "EnginePrompt", "Held", "Options", "Served", "Subject", "check_gateway"]

_ELSEWHERE = Table()
_ELSEWHERE.elsewhere(
    29,
    "a worker that drains finishes its episodes",
    "a drain is of the worker and has no URL: the tests of groups that drain",
)
_ELSEWHERE.elsewhere(
    31,
    "log-probs computed anew are within the bound",
    "needs a model's weights: the learner measures the gap in every run, and stops above its bound",
)
_ELSEWHERE.elsewhere(
    33,
    "real clients, unchanged",
    "each needs an environment of its own: make agents, make harnesses",
)
_ELSEWHERE.elsewhere(
    34,
    "an agent's reward rises as the own loop's",
    "needs training with a real engine: python -m benchmarks.existing_agents",
)
_ELSEWHERE.elsewhere(
    35,
    "a thousand open episodes: no leak, and the latency that is added",
    "is measured and not passed: python -m benchmarks.gateway",
)
CASES: Mapping[int, Case] = dict(
    sorted(
        (number, case)
        for table in (rows.TABLE, histories.TABLE, calls.TABLE, requests.TABLE, _ELSEWHERE)
        for number, case in table.cases.items()
    )
)
"""All cases by number."""


async def check_gateway(subject: Subject, number: int) -> None:
    """Puts a gateway through a case.

    Args:
        subject: The gateway.
        number: The case, one with a program.

    Raises:
        AssertionError: A property does not hold.
        ValueError: The case has no program; the message says what shows it.
    """
    case = CASES[number]
    if case.check is None:
        raise ValueError(f"case {number}, {case.title}: {case.elsewhere}")
    try:
        await case.check(subject)
    except AssertionError as error:
        raise AssertionError(f"case {number}, {case.title}: {error}") from error
