"""`kestrl run` and `kestrl eval`: resolve addresses, plan, start the components, watch them, and report the result."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from kestrl._app.local.check import check_job, fitted_job
from kestrl._app.local.engine_fleet import LocalEngineFleet
from kestrl._app.local.processes import Launcher, require_services
from kestrl._app.local.report import EXIT_INTERRUPTED, RunOutcome, report_finished, report_unfinished
from kestrl._app.local.rundir import RECORD, RunDir, make_folders, removed_if_refused
from kestrl._app.local.runner_record import INTERVAL, RunnerRecord, RunnerRecordFile
from kestrl._app.local.secrets import Secrets, open_storage
from kestrl._app.local.site import (
    Listener,
    interpreter_of,
    local_devices,
    refuse_cluster_isolation,
    reserved_ports,
    site_of,
)
from kestrl._app.local.supervisor import Supervisor
from kestrl._app.local.view import View, make_view
from kestrl._shared.conventions import EXIT_FAILED, EXIT_INPUT
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.site import Site
from kestrl._shared.rpc import channel, stream
from kestrl._shared.rpc.run_report import state_of
from kestrl._shared.spec import AgentRLJob
from kestrl.api.learner.v1 import learner_pb2, learner_pb2_grpc
from kestrl.errors import KestrlError, UserInputError
from kestrl.runstate.state import RunState
from kestrl.storage import ObjectStore

log = logging.getLogger(__name__)
RECONNECT_SECONDS = 0.5
Replan = Callable[[Sequence[Component], Site], Sequence[Component]]


class RunFollower(Protocol):
    """What sends a run elsewhere while it goes on. It reports in words, and whether they are a problem."""

    name: str

    async def follow(self, run: RunDir, report: Callable[[str, bool], None]) -> None:
        """Sends what the run stores, until it is cancelled."""
        ...

    async def finish(self, run: RunDir, report: Callable[[str, bool], None]) -> None:
        """Sends the rest of a run that has ended, within a time limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Command-line options beside the manifest."""

    manifest_dir: Path
    cache_dir: Path
    base_port: int | None = None
    active_deadline: float | None = None
    verdict: Callable[[ObjectStore], str] | None = None
    """What became of the last stored episode, in one line, for the live view."""
    follower: RunFollower | None = None
    """What sends the run to the MLflow server of `telemetry.mlflow`."""


class Runner:
    """One run of one job on this machine."""

    def __init__(
        self,
        job: AgentRLJob,
        run: RunDir,
        site: Site,
        components: Sequence[Component],
        view: View,
        options: RunOptions,
        ports: dict[Listener, int],
    ) -> None:
        credentials = {secret.value: secrets.token_urlsafe(24) for secret in Secret}
        self._job, self._run, self._site, self._view, self._options = job, run, site, view, options
        self._state = RunState()
        limit = None if site.devices is None else site.devices.engine_limit
        record = RunnerRecord(run=run.id, job=job.metadata.name, pid=os.getpid(), engine_limit=limit)
        self._record = RunnerRecordFile(run.path / RECORD, record)
        self._token = credentials[Secret.CONTROLLER_TO_LEARNER.value]
        granted = Secrets(job, options.manifest_dir).by_role()
        launcher = Launcher(folder=run.path, secrets=credentials, granted=granted)
        self._supervisor = Supervisor(components, launcher, self._changed)
        self._fleet = LocalEngineFleet(job, site, run.path, ports, self._supervisor, view.say)
        self._interrupts = 0

    def _changed(self, *, force: bool = False) -> None:
        self._record.update(
            force=force,
            state=self._state,
            components={name: child.record() for name, child in self._supervisor.observed.items()},
        )
        self._view.update(self._state, self._supervisor.observed)

    async def run(self) -> RunOutcome:
        """Runs until the learner ends, an interrupt, or a failure."""
        main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._interrupt, main)
        self._fleet.write()
        watching = [
            asyncio.create_task(self._fleet.run(), name="engine-fleet"),
            asyncio.create_task(self._watch(), name="watch-progress"),
            asyncio.create_task(self._keep_record(), name="keep-record"),
        ]
        follower = self._options.follower
        if follower is not None:
            watching.append(asyncio.create_task(follower.follow(self._run, self._followed), name=follower.name))
        for task in watching:
            task.add_done_callback(self._say_failure)
        try:
            outcome = await self._supervised()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            if follower is not None:
                await self._finish(follower)
            for name in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(name)
        self._record.update(ended=outcome.code, reason=outcome.reason)
        self._changed(force=True)
        return outcome

    async def _supervised(self) -> RunOutcome:
        """What becomes of the components."""
        try:
            async with asyncio.timeout(self._options.active_deadline):
                return self._ended(await self._supervisor.run())
        except TimeoutError:
            return RunOutcome(EXIT_FAILED, "activeDeadline passed")
        except UserInputError as error:
            return RunOutcome(EXIT_INPUT, str(error))
        except KestrlError as error:
            return RunOutcome(EXIT_FAILED, str(error))
        except asyncio.CancelledError:
            return RunOutcome(
                EXIT_INTERRUPTED, "interrupted twice: stopped immediately, without a checkpoint of the last steps"
            )

    async def _finish(self, follower: RunFollower) -> None:
        """Has the rest sent. The run has ended: whatever happens here changes nothing of its outcome."""
        self._followed("sends the rest; interrupt to end without it", False)
        try:
            await follower.finish(self._run, self._followed)
        except asyncio.CancelledError:
            self._followed("interrupted before the rest was sent", True)
        except (OSError, KestrlError) as error:
            self._followed(f"the rest was not sent: {error}", True)

    def _followed(self, words: str, problem: bool) -> None:
        """Reports what has become of the run where it is sent to."""
        assert self._options.follower is not None
        name = self._options.follower.name
        self._record.update(force=True, followers={name: words})
        self._view.say(f"{'warning: ' if problem else ''}{name}: {words}")

    def _say_failure(self, task: asyncio.Task[None]) -> None:
        """Reports the end of a task beside the run, which goes on without it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s has ended", task.get_name(), exc_info=error)
            self._view.say(f"warning: {task.get_name()} has ended: {type(error).__name__}: {error}")

    def _ended(self, status: int) -> RunOutcome:
        if self._interrupts:
            return RunOutcome(EXIT_INTERRUPTED, "interrupted")
        if status == 0:
            return RunOutcome(0)
        learner = next(child for child in self._supervisor.observed.values() if child.component.role is Role.LEARNER)
        return RunOutcome(EXIT_FAILED, learner.last_error or f"the learner ended with status {status}")

    def _interrupt(self, main: asyncio.Task[Any] | None) -> None:
        """First interrupt: drain and checkpoint. Second: stop immediately."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._view.say(
                "draining: finishing and checkpointing the current step; interrupt again to stop immediately"
            )
            self._supervisor.drain_learner()
        elif main is not None:
            main.cancel()

    async def _watch(self) -> None:
        """Streams the learner's progress during the run and reconnects after interruptions."""
        address = self._site.endpoint(Role.LEARNER, 0).address
        async with channel(address) as connection:
            stub = learner_pb2_grpc.LearnerServiceStub(connection)
            while True:
                with suppress(KestrlError):  # not up yet, or ended, which the supervisor reports
                    async for report in stream(
                        stub.WatchProgress,
                        learner_pb2.WatchProgressRequest(),
                        learner_pb2.WatchProgressResponse,
                        timeout=None,
                        peer="learner",
                        token=self._token,
                    ):
                        self._state = state_of(report)
                        self._changed()
                self._changed()
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _keep_record(self) -> None:
        """Writes delayed changes of the run record."""
        while True:
            await asyncio.sleep(INTERVAL)
            self._record.flush()


def run_job(
    job: AgentRLJob,
    run: RunDir,
    options: RunOptions,
    console: Console,
    *,
    resumed: bool = False,
    replan: Replan | None = None,
) -> int:
    """Runs a job in the folder of a run and returns the exit code. All started processes have ended on return.

    Raises:
        UserInputError: Another runner holds the lock of the run, or something that the job references does not exist.
    """
    with removed_if_refused(run) as refusal:
        require_services()
        if run.lock() is None:
            refusal.pop_all()
            raise UserInputError(
                f"run {run.id} is already running (pid {run.runner_pid()}); see `kestrl status {run.id}`"
            )
        job = fitted_job(job, options.manifest_dir)
        make_folders(run, job, options.manifest_dir)
        refuse_cluster_isolation(job)
        with reserved_ports(job, options.base_port) as ports:
            site = site_of(
                job,
                run,
                options.manifest_dir,
                ports=ports,
                cache_dir=options.cache_dir,
                devices=local_devices(job),
                environment_python=interpreter_of(job.spec.environment),
                opened=partial(open_storage, job, options.manifest_dir),
                say=lambda line: console.print(line, soft_wrap=True, markup=False, highlight=False),
            )
            findings = check_job(job, base=options.manifest_dir, cache_dir=options.cache_dir, engine=True)
            findings.raise_problems()
            store = open_storage(job, options.manifest_dir, site.storage)
            store.check()
            components: Sequence[Component] = plan(job, site)
            if replan is not None:
                components = replan(components, site)
            verdict = None if options.verdict is None else partial(options.verdict, store)
            with make_view(console, f"{job.metadata.name} ({run.id})", verdict) as view:
                view.say(f"{'resuming' if resumed else 'starting'} run {run.id} in {run.path}")
                for note in () if site.devices is None else site.devices.notes:
                    view.say(note)
                for warning in findings.warnings:
                    view.say(f"warning: {warning}")
                runner = Runner(job, run, site, components, view, options, ports)
                refusal.pop_all()
                outcome = asyncio.run(runner.run())
            summary = run.copy_summary(store)
            if outcome.code == 0 and replan is None:
                return report_finished(console, run, summary, store)
            return report_unfinished(console, run, outcome, summary) if outcome.code else 0
