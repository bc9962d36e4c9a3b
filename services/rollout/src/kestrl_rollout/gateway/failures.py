"""What is answered where a call became no turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kestrl.agents import LimitReached
from kestrl.errors import KestrlError, UserCodeError
from kestrl_rollout.gateway.fields import Refused

NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class GatewayProblem:
    """An error, before a face writes it."""

    status: int
    message: str
    code: str
    param: str = ""
    """The field that it is about."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


OVER = GatewayProblem(410, "the episode is over", "episode_over", headers=NO_RETRY)


def problem_of(error: BaseException) -> GatewayProblem:
    """The problem that a client learns of.

    Raises:
        BaseException: It is no failure of a call.
    """
    match error:
        case Refused():
            return GatewayProblem(400, str(error), error.code, error.field)
        case LimitReached() | UserCodeError():
            return GatewayProblem(400, str(error), error.code)
        case KestrlError():
            # The episode has failed, with this as its failure: no retry can help.
            return GatewayProblem(500, str(error), f"{error.boundary}/{error.code}", headers=NO_RETRY)
        case asyncio.CancelledError():
            return OVER
        case _:
            raise error
