"""The judge's `main`."""

from __future__ import annotations

from collections.abc import Awaitable

from kestrl.api.judge.v1 import judge_pb2_grpc as stubs
from kestrl.plan.settings import JudgeSettings
from kestrl.rpc import serve
from kestrl.telemetry.metrics import observe
from kestrl.telemetry.names import Metric
from kestrl_judge.rules import rule_scorers, start_all
from kestrl_judge.servicer import JudgeServicer


async def run_judge(settings: JudgeSettings, *, until: Awaitable[object] | None = None) -> None:
    """Starts the processes of the rewards, then serves until SIGTERM (or until `until` is done).

    Raises:
        UserInputError: A reward cannot be loaded, or the port is taken.
    """
    scorers = rule_scorers(settings)
    try:
        await start_all(scorers)
        observe(Metric.REWARD_RESTARTS, lambda: {scorer.name: scorer.restarts for scorer in scorers})
        servicer = JudgeServicer(settings.component, scorers)
        await serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_JudgeServiceServicer_to_server(servicer, server),
            bundles=True,
            until=until,
        )
    finally:
        for scorer in scorers:
            await scorer.stop()
