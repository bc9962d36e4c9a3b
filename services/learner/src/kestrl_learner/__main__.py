"""`python -m kestrl_learner --settings FILE`: the learner."""

from __future__ import annotations

import asyncio
import sys

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.rpc import serve
from kestrl._shared.service import run_service
from kestrl.api.learner.v1 import learner_pb2_grpc as stubs


async def work(settings: LearnerSettings) -> None:
    """Runs the job to its end and serves its progress from the start; with `keep_alive` it keeps serving until it is
    stopped.
    """
    from kestrl_learner.progress.metrics import observe_progress
    from kestrl_learner.run import KeepAlive, LearnerRun
    from kestrl_learner.servicer import LearnerServicer

    run = LearnerRun(settings)
    observe_progress(run.progress)
    keep_alive = KeepAlive(run)
    main = asyncio.create_task(keep_alive.main(), name="run")

    async def drain() -> None:
        cut_short = keep_alive.stop()
        if cut_short and run.training:
            run.drain()
        elif cut_short:  # nothing was trained yet, so there is nothing to finish and to checkpoint
            run.abandon()
            main.cancel()
        await asyncio.wait([main])

    await serve(
        settings.component,
        settings.listen,
        lambda server: stubs.add_LearnerServiceServicer_to_server(LearnerServicer(run.progress, run.drain), server),
        drain=drain,
        until=main,
    )


if __name__ == "__main__":
    sys.exit(run_service(LearnerSettings, work))
