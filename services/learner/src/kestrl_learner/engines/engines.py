"""The inference engines, and the policy versions that each has verified according to its agent.

Engines come and go. One that joins gets no session before it has loaded and proved the version, and no publication
waits for it; one that leaves, as its agent says when it is asked to end, is named no more, and its running turns are
accepted.

One task per engine reconciles it: it polls the agent, retires versions that are no longer wanted and loads missing
ones. Publishing adds a wanted version and waits. An engine that fails the verification of a version is quarantined for
it: no request names it, and loading is retried later. A restarted engine is used again once its agent has verified the
version anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.settings.learner import EngineEntry, LearnerSettings
from kestrl._shared.rpc import channel
from kestrl._shared.rpc.codec import engine_state_from_proto
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import failure_from_proto, policy_from_proto, policy_to_proto
from kestrl.errors import Boundary, Failure, FailureError, KestrlError, PlaceError
from kestrl.runstate.events import EnginesObserved, VersionPublished
from kestrl.runstate.state import EngineReport
from kestrl.runstate.states import EngineState
from kestrl_learner.concurrency import Listeners, Signal
from kestrl_learner.engines.admission import EngineLoad
from kestrl_learner.engines.device_turns import device_turn, started
from kestrl_learner.engines.discovery import EngineDiscovery, discovery_of
from kestrl_learner.engines.known_engine import KnownEngine, LoadFailure, reported_build, reported_load, reported_work
from kestrl_learner.engines.proofs import Proofs
from kestrl_learner.engines.serving import Serving
from kestrl_learner.progress.progress import Progress

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
CALL_SECONDS = 10.0
LOAD_SECONDS = 120.0
STRAGGLER_SECONDS = 15.0
"""How long a publication waits for further engines once one has verified it; the others join later."""
BACKOFF = Backoff(2.0, 60.0)
"""Pauses before an engine loads a version again that it did not verify."""


def _names(entries: Iterable[EngineEntry]) -> str:
    return ", ".join(entry.name for entry in entries) or "none"


class NoEngineProved(KestrlError):
    """No engine serves the version, so that no request can name one."""

    boundary = Boundary.ENGINE
    code = "no_engine_proved"


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A published version and its address."""

    policy: PolicyVersion
    uri: str
    context: Context = field(default_factory=copy_context)
    """Context of the publication, so that loading is traced as a part of it."""


class Engines:
    """All engines of the job. `watch` must be running."""

    def __init__(self, discovery: EngineDiscovery, progress: Progress, start_seconds: float) -> None:
        self._discovery = discovery
        self._known: list[KnownEngine] = []
        self._progress, self._start_seconds = progress, start_seconds
        self._wanted: dict[str, PublishedPolicy] = {}
        self.proofs, self.serving = Proofs(), Serving()
        self._device_taken = False
        """Whether the learner has the device that engines use in turns with it; they are woken when it has not."""
        self._changed = Signal()
        self.changes = Listeners()
        """Called when what the engines have proved may have changed."""
        self.looks = Listeners()
        """Called after every look at an engine that answers."""
        observe(Metric.QUARANTINED, lambda: {engine.entry.name: len(engine.load_failures) for engine in self._known})

    @classmethod
    def of_settings(cls, settings: LearnerSettings, progress: Progress) -> Engines:
        """The engines of a run, found as its settings say."""
        return cls(discovery_of(settings), progress, settings.start_seconds)

    async def close(self) -> None:
        for engine in self._known:
            await engine.close()

    def proved(self, policy: PolicyVersion) -> list[EngineEntry]:
        """The engines that have proved a version, now."""
        return [engine.entry for engine in self._known if engine.serves(policy.name) and not engine.suspected]

    def suspect(self, names: Iterable[str]) -> None:
        """A request to one of these engines failed: none is named again before its agent has looked at it.

        Else a scenario could use up its attempts on an engine that was killed, before the agent's own look finds out.
        """
        suspected = set(names)
        for engine in self._known:
            if engine.entry.name in suspected:
                engine.suspected = True
                engine.wake.set()

    @asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None]:
        """The learner's turn on a device that the engines use in turns with it; raises what `started` and `device_turn`
        do.
        """
        await self._changed.wait_for(lambda: self._known)
        await started(self._known, self._changed, seconds=self._start_seconds)
        self._device_taken = True
        try:
            async with device_turn(self._known, seconds=self._start_seconds):
                yield
        finally:
            self._device_taken = False
            self._look()  # engines that sleep are woken

    def loads(self) -> dict[str, EngineLoad]:
        """Load of the engines that are up, as of the last poll."""
        return {engine.entry.name: engine.load for engine in self._known if engine.up}

    def wanted(self) -> set[str]:
        """Names of the versions that are published and not retired."""
        return set(self._wanted)

    async def publish(
        self, policy: PolicyVersion, uri: str, *, parent: str | None = None, probe_distance: float | None = None
    ) -> list[EngineEntry]:
        """Lets the engines load and verify a version; returns those that did by the end of a short wait, at least one.

        Args:
            policy: The version.
            uri: Address of its folder.
            parent: Name of the version it was trained from, for the progress.
            probe_distance: Probe distance to the version before, for the progress; None if it is not known.

        Raises:
            NoEngineProved: No engine can, or none did within `start_seconds`.
            PlaceError: No engine can store it: disks are full or not writable.
        """
        serving = [engine for engine in self._known if engine.caught_up] if self._wanted else None
        self._wanted[policy.name] = PublishedPolicy(policy, uri)
        self.proofs.add(policy)
        self._progress.emit(
            VersionPublished(version=policy, uri=uri, parent=parent or "", probe_distance=probe_distance)
        )
        self._publish_status()  # at once: engines have not verified this version yet
        self._look()
        await self.wait_verified(policy)
        waited = list(self._known) if serving is None else serving  # who joins later keeps nobody waiting
        with suppress(TimeoutError):
            async with asyncio.timeout(STRAGGLER_SECONDS):
                await self._changed.wait_for(lambda: all(engine.settled(policy.name) for engine in waited))
        return self.proved(policy)

    async def wait_verified(self, policy: PolicyVersion) -> list[EngineEntry]:
        """Waits for the first engine that verified a version; returns all that have.

        Raises:
            NoEngineProved: No engine can, or none did within `start_seconds`.
            PlaceError: No engine can store it: disks are full or not writable.
            FailureError: No engine could fetch it within `start_seconds`, since storage cannot be used.
        """
        qualifier = "and retrying cannot help"
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._changed.wait_for(lambda: self.proved(policy) or self._hopeless(policy.name))
        except TimeoutError:
            qualifier = f"for {self._start_seconds:g} s"
        if not (proved := self.proved(policy)):
            states = "; ".join(str(engine) for engine in self._known) or "none was found"
            if self._known and all(engine.storage_refused(policy.name) for engine in self._known):
                raise PlaceError(f"no engine can keep {policy.name} ({states})")
            away = [failure for engine in self._known if (failure := engine.storage_failure(policy.name)) is not None]
            if away and len(away) == len(self._known):
                message = f"no engine could fetch {policy.name} {qualifier} ({states})"
                raise FailureError(replace(away[0], message=message, component=""))
            raise NoEngineProved(f"no engine has proved {policy.name} {qualifier} ({states})")
        return proved

    def _hopeless(self, name: str) -> bool:
        return bool(self._known) and all(engine.hopeless(name) for engine in self._known)

    async def retire(self, names: set[str], *, accepted_from: int) -> None:
        """Stops wanting versions that nothing samples from any more: each engine unloads them before it loads another.

        Args:
            names: The versions.
            accepted_from: Step of the oldest version that completions may still name; older proofs are forgotten.
        """
        for name in names & set(self._wanted):
            del self._wanted[name]
            for engine in self._known:
                engine.proved.discard(name)
                engine.load_failures.pop(name, None)
        self.proofs.forget(self._wanted, before=accepted_from)
        self._look()

    def _look(self) -> None:
        """Looks at every engine soon."""
        for engine in self._known:
            engine.wake.set()

    async def watch(self) -> None:
        """Finds engines, and reconciles and polls every one of them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                entries = await self._discovery.look()
                if entries is not None:
                    await self._apply(entries, tasks)
                await asyncio.sleep(self._discovery.seconds)

    async def _apply(self, entries: Sequence[EngineEntry], tasks: asyncio.TaskGroup) -> None:
        """Begins to watch the engines that have joined, and ends it for those that have left."""
        watched_entries = [engine.entry for engine in self._known]
        departed_engines = [engine for engine in self._known if engine.entry not in entries]
        joined = [entry for entry in entries if entry not in watched_entries]
        if not departed_engines and not joined:
            return
        self._known = [engine for engine in self._known if engine not in departed_engines]
        for entry in joined:
            engine = self._add(entry)
            engine.watching = tasks.create_task(self._watch(engine), name=f"watch-{entry.name}")
        self._known.sort(key=lambda engine: entries.index(engine.entry))
        for engine in departed_engines:
            engine.lost = True
            self._progress.idle.forget(engine.entry.name)
            self._progress.work.forget(engine.entry.name)
        log.info("engines: %s joined, %s left", _names(joined), _names([engine.entry for engine in departed_engines]))
        self._publish_status()  # before anything is awaited: groups are to leave engines that leave
        for engine in departed_engines:
            await engine.close()

    def _add(self, entry: EngineEntry) -> KnownEngine:
        connection = channel(entry.agent_address)
        engine = KnownEngine(entry, stubs.EngineAgentServiceStub(connection), connection)
        self._known.append(engine)
        return engine

    async def _watch(self, engine: KnownEngine) -> None:
        while True:
            engine.wake.clear()
            await self._poll(engine)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await engine.wake.wait()

    def reports(self) -> list[EngineReport]:
        """Reports on the engines for the run's progress, in the job's order."""
        return [engine.report(self._progress.state.policy.version) for engine in self._known]

    def _publish_status(self) -> None:
        policies = [published.policy for published in self._wanted.values()]
        self._record_proofs(policies)
        for engine in self._known:
            engine.update_newest(policies)
        version = self._progress.state.policy.version
        converged = 0 if version is None else len(self.proved(version))
        reports = tuple(self.reports())
        staying = sum(not engine.leaving for engine in self._known)
        self._progress.emit(EnginesObserved(verified=converged, reports=reports, total=staying))
        self._changed.notify()
        self.changes.notify()

    def _record_proofs(self, policies: Iterable[PolicyVersion]) -> None:
        proved = {engine.entry.name: engine.proved for engine in self._known}
        self.proofs.observe(proved, now=asyncio.get_running_loop().time())
        # A suspected engine keeps the sessions that it has: they move when it does not answer.
        self.serving.update(
            {policy: tuple(engine.entry for engine in self._known if engine.serves(policy.name)) for policy in policies}
        )

    async def _poll(self, engine: KnownEngine) -> None:
        before, suspected = engine.snapshot(), engine.suspected
        try:
            request = pb.GetEngineRequest(look=suspected)
            answer = await engine.ask(engine.stub.GetEngine, request, pb.GetEngineResponse, CALL_SECONDS)
        except KestrlError as error:
            if engine.state is not None:
                log.warning("the agent of %s does not answer: %s", engine.entry.name, error)
                engine.lost = True
            engine.state, engine.failure = None, error.failure(component=engine.entry.name)
            engine.proved.clear()
            engine.caught_up = False
            engine.suspected = engine.suspected and not suspected
            self._progress.idle.forget(engine.entry.name)
            self._publish_status()
            return
        loaded_policies = {
            policy.name: item for item in answer.policies if (policy := policy_from_proto(item.policy)) is not None
        }
        engine.state, engine.lost = engine_state_from_proto(answer.state), False
        engine.failure = failure_from_proto(answer.failure) if answer.HasField("failure") else None
        engine.unproved = {
            name: failure_from_proto(item.failure) for name, item in loaded_policies.items() if item.HasField("failure")
        }
        engine.load, engine.build = reported_load(answer), reported_build(answer) or engine.build
        if (work := reported_work(answer)) is not None:
            self._progress.work.observe(engine.entry.name, work)
        if answer.HasField("idle") and engine.up:
            self._progress.idle.observe(engine.entry.name, idle=answer.idle.idle, observed=answer.idle.observed)
        else:
            self._progress.idle.forget(engine.entry.name)
        self.looks.notify()
        engine.proved = {name for name, item in loaded_policies.items() if item.proved and name in self._wanted}
        asleep = engine.state is EngineState.ASLEEP
        engine.caught_up = (engine.up or asleep) and (engine.caught_up or bool(engine.proved))
        for name in engine.proved:
            engine.load_failures.pop(name, None)
        engine.suspected = engine.suspected and not suspected
        if suspected or engine.snapshot() != before:
            self._publish_status()
        if asleep:
            await self._wake(engine)
            return
        for name in set(loaded_policies) - set(self._wanted):
            await self._retire(engine, name, loaded_policies[name])
        if engine.up:
            await self._load_missing(engine, loaded_policies)

    async def _load_missing(self, engine: KnownEngine, loaded_policies: dict[str, pb.LoadedPolicy]) -> None:
        """Loads missing versions, newest first. A recovering agent restores by itself the versions it holds."""
        for name, published in reversed(list(self._wanted.items())):
            recovering = engine.state is EngineState.RECOVERING and name in loaded_policies
            failed = engine.load_failures.get(name)
            may_retry = failed is None or asyncio.get_running_loop().time() >= failed.not_before
            if name not in engine.proved and not recovering and may_retry:
                await self._load(engine, published)

    async def _wake(self, engine: KnownEngine) -> None:
        """Wakes an engine that sleeps outside of the learner's turn: its turn is over, or was an earlier learner's."""
        if self._device_taken:
            return
        try:
            await engine.ask(engine.stub.WakeEngine, pb.WakeEngineRequest(), pb.WakeEngineResponse, self._start_seconds)
        except KestrlError as error:
            log.error("%s was not woken, retrying: %s", engine.entry.name, error)
        else:
            engine.wake.set()

    async def _retire(self, engine: KnownEngine, name: str, item: pb.LoadedPolicy) -> None:
        request = pb.RetirePolicyRequest(policy=item.policy)
        try:
            await engine.ask(engine.stub.RetirePolicy, request, pb.RetirePolicyResponse, CALL_SECONDS)
        except KestrlError as error:
            log.warning("%s did not retire %s, retrying: %s", engine.entry.name, name, error)

    async def _load(self, engine: KnownEngine, published: PublishedPolicy) -> None:
        name = published.policy.name
        request = pb.LoadPolicyRequest(policy=policy_to_proto(published.policy), uri=published.uri)
        try:
            await asyncio.create_task(
                engine.ask(engine.stub.LoadPolicy, request, pb.LoadPolicyResponse, LOAD_SECONDS),
                context=published.context.copy(),
            )
        except KestrlError as error:
            self._quarantine(engine, name, error.failure(component=engine.entry.name))
        else:
            engine.caught_up = True
            if name in self._wanted:
                engine.proved.add(name)
                engine.load_failures.pop(name, None)
        self._publish_status()

    def _quarantine(self, engine: KnownEngine, name: str, failure: Failure) -> None:
        if name not in self._wanted:
            return
        engine.proved.discard(name)
        times = engine.load_failures[name].times + 1 if name in engine.load_failures else 1
        not_before = asyncio.get_running_loop().time() + BACKOFF.pause(times)
        engine.load_failures[name] = LoadFailure(failure, times, not_before)
        self._progress.count_failure(failure)
        log.error("%s is quarantined for %s: %s", engine.entry.name, name, failure)
