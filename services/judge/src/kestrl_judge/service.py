"""The judge's `main`."""

from __future__ import annotations

from collections.abc import Awaitable

from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.rpc import serve
from kestrl_judge.scorers import make_scorers
from kestrl_judge.scoring import open_all
from kestrl_judge.servicer import JudgeServicer


async def run_judge(settings: JudgeSettings, *, until: Awaitable[object] | None = None) -> None:
    """Opens the scorers, then serves until SIGTERM (or until `until` is done).

    Raises:
        UserInputError: A reward cannot be loaded, or the port is taken.
    """
    scorers = make_scorers(settings)
    try:
        await open_all(scorers)
        await serve(
            settings.component,
            settings.listen,
            JudgeServicer(settings.component, scorers).add_to,
            bundles=True,
            until=until,
        )
    finally:
        for scorer in scorers:
            await scorer.close()
