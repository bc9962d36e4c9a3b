"""The inference engines: which have proved which version, told by their agents, never assumed.

One task an engine brings it to what is wanted: it asks what the engine holds, retires what is not wanted, loads what is missing.
Publishing is wanting a version and waiting. An engine that fails the proof is quarantined for that version: named in no request, and
tried again later. One that restarted is named again only when its agent says that it proved the version anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from kestrl import engine_failure
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.credentials import Secret
from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure, KestrlError, PlaceError
from kestrl.plan.settings import EngineEntry
from kestrl.rpc import Channel, call, channel
from kestrl.rpc.codec import failure_from_proto, policy_from_proto, policy_to_proto
from kestrl.telemetry.metrics import observe
from kestrl.telemetry.names import Metric
from kestrl_learner.admission import EngineLoad
from kestrl_learner.aio import Signal
from kestrl_learner.progress import EngineReport, Progress

log = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
CALL_SECONDS = 10.0
LOAD_SECONDS = 120.0
STRAGGLER_SECONDS = 15.0
"""How long a publication waits for further engines once one has proved it; the others join when they can."""
FIRST_RETRY, LONGEST_RETRY = 2.0, 60.0
LONGEST_REASON = 500
UP = (pb.ENGINE_STATE_READY, pb.ENGINE_STATE_RECOVERING)


def _nobody() -> None:
    """Nobody listens yet."""


class NoEngineProved(KestrlError):
    """No engine serves the version: nothing may be named in a request."""

    boundary = Boundary.ENGINE
    code = "no_engine_proved"


@dataclass(frozen=True, slots=True)
class Published:
    """A version and where it lies."""

    policy: PolicyVersion
    uri: str
    context: Context = field(default_factory=copy_context)
    """Where it was published: the engines' loading is traced as a part of that."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an engine could not be brought to serve a version."""

    failure: Failure
    times: int
    not_before: float
    """When it is tried again, by the loop's clock."""


@dataclass(slots=True)
class Known:
    """What is known of one engine."""

    entry: EngineEntry
    stub: Any
    connection: Channel
    state: int = pb.ENGINE_STATE_UNSPECIFIED
    """As its agent last said; unspecified while that does not answer."""
    lost: bool = False
    """Whether its agent answered once and does not now."""
    doubted: bool = False
    """Whether a request to it failed since it was looked at."""
    proved: set[str] = field(default_factory=set[str])
    newest: PolicyVersion | None = None
    """The newest version it has proved since it came up, retired or not."""
    said: Failure | None = None
    """What is wrong with it, as its agent last said, or with the agent, when that does not answer."""
    unproved: dict[str, Failure] = field(default_factory=dict[str, Failure])
    """Why its agent could not prove a version anew."""
    trouble: dict[str, Trouble] = field(default_factory=dict[str, Trouble])
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    load: EngineLoad = field(default_factory=EngineLoad)

    def settled(self, name: str) -> bool:
        """Whether nothing more is to be expected of it for a version soon."""
        return name in self.proved or name in self.trouble or self.lost or self.state == pb.ENGINE_STATE_DOWN

    def out_of_place(self, name: str) -> bool:
        """Whether a version failed because the disk beside the engine is full or not ours: a person has to act."""
        return name in self.trouble and self.trouble[name].failure.code == PlaceError.code

    def hopeless(self, name: str) -> bool:
        """Whether it will never serve a version: it cannot load that one, or cannot start at all."""
        if self.said is not None and self.said.code == engine_failure.CODE and not self.said.retryable:
            return True
        return name in self.trouble and not self.trouble[name].failure.retryable

    def seen(self) -> tuple[Any, ...]:
        """What others are told of when it changes."""
        return self.state, set(self.proved), self.said, dict(self.unproved)

    def standing(self, newest: PolicyVersion | None) -> str:
        """Where it stands with the newest published version, in a word."""
        if self.state not in UP:
            return "away" if self.lost or self.state == pb.ENGINE_STATE_DOWN else "starting"
        if newest is None or newest.name in self.proved:
            return "serving"
        if newest.name in self.trouble:
            return "quarantined"
        return "recovering" if self.state == pb.ENGINE_STATE_RECOVERING else "loading"

    def why(self, newest: PolicyVersion | None) -> str:
        """Why it does not serve the newest version, as far as is known."""
        trouble = None if newest is None else self.trouble.get(newest.name)
        if self.state in UP and trouble is not None:
            return f"{trouble.failure} (tried {trouble.times}x)"
        failure = self.said or (None if newest is None else self.unproved.get(newest.name))
        return "" if failure is None else str(failure)

    def look_at_proofs(self, wanted: Iterable[PolicyVersion]) -> None:
        """Takes note of the newest version it has proved; while it is not settled, only of what it has proved again."""
        known = [policy for policy in wanted if policy.name in self.proved]
        if self.state == pb.ENGINE_STATE_READY and self.newest is not None:
            known.append(self.newest)
        self.newest = max(known, key=lambda policy: policy.step, default=None)

    def report(self, newest: PolicyVersion | None) -> EngineReport:
        """What is told of it to who watches the run."""
        state = self.standing(newest)
        return EngineReport(
            name=self.entry.name,
            policy=self.newest,
            lag=0 if newest is None else newest.step - (-1 if self.newest is None else self.newest.step),
            state=state,
            message="" if state == "serving" else self.why(newest)[:LONGEST_REASON],
        )

    def __str__(self) -> str:
        why = "; ".join(str(trouble.failure) for trouble in self.trouble.values()) or (self.said and str(self.said))
        return f"{self.entry.name}: {why or pb.EngineState.Name(self.state)}"  # type: ignore[arg-type]


class Engines:
    """All engines of the job. `watch` must be running."""

    def __init__(self, entries: tuple[EngineEntry, ...], progress: Progress, start_seconds: float) -> None:
        self._known: list[Known] = []
        for entry in entries:
            connection = channel(entry.agent_address)
            self._known.append(Known(entry, stubs.EngineAgentServiceStub(connection), connection))
        self._progress, self._start_seconds = progress, start_seconds
        self._wanted: dict[str, Published] = {}
        self._changed = Signal()
        self.on_change: Callable[[], None] = _nobody
        self.on_load: Callable[[], None] = _nobody
        """Called after every look at an engine."""
        observe(Metric.QUARANTINED, lambda: {known.entry.name: len(known.trouble) for known in self._known})

    async def close(self) -> None:
        for known in self._known:
            await known.connection.close()

    def proved(self, policy: PolicyVersion) -> list[EngineEntry]:
        """The engines that have proved a version, now."""
        return [known.entry for known in self._known if policy.name in known.proved and not known.doubted]

    def doubt(self, names: Iterable[str]) -> None:
        """A request to one of these engines failed: none is named again before its agent has looked at it.

        Else a scenario could use up its attempts on an engine that was killed, before the agent's own look finds out.
        """
        doubted = set(names)
        for known in self._known:
            if known.entry.name in doubted:
                known.doubted = True
                known.wake.set()

    def loads(self) -> dict[str, EngineLoad]:
        """How busy the engines are that are up, as they told at the last look."""
        return {known.entry.name: known.load for known in self._known if known.state in UP}

    def wanted(self) -> set[str]:
        """Names of the versions that are published and not retired."""
        return set(self._wanted)

    def published(self, name: str) -> bool:
        """Whether this learner published a version and has not retired it."""
        return name in self._wanted

    async def publish(self, policy: PolicyVersion, uri: str, *, parent: str | None = None) -> list[EngineEntry]:
        """Has the engines load and prove a version; returns those that did: all that can soon, one at least.

        Args:
            policy: The version.
            uri: Where it lies.
            parent: Name of the version it was trained from; only told.

        Raises:
            NoEngineProved: None will, or none did for `start_seconds`.
            PlaceError: None can keep it: their disk is full or not theirs.
        """
        self._wanted[policy.name] = Published(policy, uri)
        self._progress.update(policy=policy, policy_uri=uri, policy_parent=parent or "")
        self._tell()  # at once: what engines proved before says nothing of this one
        for known in self._known:
            known.wake.set()
        await self.some(policy)
        with suppress(TimeoutError):
            async with asyncio.timeout(STRAGGLER_SECONDS):
                await self._changed.wait_for(lambda: all(known.settled(policy.name) for known in self._known))
        return self.proved(policy)

    async def some(self, policy: PolicyVersion) -> list[EngineEntry]:
        """The engines that have proved a version, as soon as there is one.

        Raises:
            NoEngineProved: None will, or none did for `start_seconds`.
            PlaceError: None can keep it: their disk is full or not theirs.
        """
        how = "and trying again will not help"
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._changed.wait_for(lambda: self.proved(policy) or self._hopeless(policy.name))
        except TimeoutError:
            how = f"for {self._start_seconds:g} s"
        if not (proved := self.proved(policy)):
            said = "; ".join(str(known) for known in self._known)
            if all(known.out_of_place(policy.name) for known in self._known):
                raise PlaceError(f"no engine can keep {policy.name} ({said})")
            raise NoEngineProved(f"no engine has proved {policy.name} {how} ({said})")
        return proved

    def _hopeless(self, name: str) -> bool:
        return all(known.hopeless(name) for known in self._known)

    async def retire(self, names: set[str]) -> None:
        """Versions that nothing names any more: engines forget them in their own time, before they load another."""
        for name in names & set(self._wanted):
            del self._wanted[name]
            for known in self._known:
                known.proved.discard(name)
                known.trouble.pop(name, None)
        for known in self._known:
            known.wake.set()

    async def watch(self) -> None:
        """Brings every engine to what is wanted and looks at it again and again."""
        async with asyncio.TaskGroup() as tasks:
            for known in self._known:
                tasks.create_task(self._watch(known), name=f"watch-{known.entry.name}")

    async def _watch(self, known: Known) -> None:
        while True:
            known.wake.clear()
            await self._look(known)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await known.wake.wait()

    def reports(self) -> list[EngineReport]:
        """What is told of the engines, in the job's order."""
        return [known.report(self._progress.policy) for known in self._known]

    def _tell(self) -> None:
        wanted = [published.policy for published in self._wanted.values()]
        for known in self._known:
            known.look_at_proofs(wanted)
        newest = self._progress.policy
        converged = 0 if newest is None else len(self.proved(newest))
        self._progress.update(engines_converged=converged, engines=self.reports())
        self._changed.notify()
        self.on_change()

    async def _look(self, known: Known) -> None:
        before, doubted = known.seen(), known.doubted
        try:
            seen = await call(
                known.stub.GetEngine,
                pb.GetEngineRequest(look=doubted),
                pb.GetEngineResponse,
                timeout=CALL_SECONDS,
                peer=known.entry.name,
                token=Secret.LEARNER_TO_INFERENCE.here(),
            )
        except KestrlError as error:
            if known.state != pb.ENGINE_STATE_UNSPECIFIED:
                log.warning("the agent of %s does not answer: %s", known.entry.name, error)
                known.lost = True
            known.state, known.said = pb.ENGINE_STATE_UNSPECIFIED, error.failure(component=known.entry.name)
            known.proved.clear()
            known.doubted = known.doubted and not doubted
            self._tell()
            return
        held = {policy.name: item for item in seen.policies if (policy := policy_from_proto(item.policy)) is not None}
        known.state, known.lost = seen.state, False
        known.said = failure_from_proto(seen.failure) if seen.HasField("failure") else None
        known.unproved = {
            name: failure_from_proto(item.failure) for name, item in held.items() if item.HasField("failure")
        }
        known.load = EngineLoad(
            kv_usage=seen.load.kv_usage,
            running=seen.load.running,
            waiting=seen.load.waiting,
            preemptions=seen.load.preemptions,
        )
        self.on_load()
        known.proved = {name for name, item in held.items() if item.proved and name in self._wanted}
        for name in known.proved:
            known.trouble.pop(name, None)
        known.doubted = known.doubted and not doubted
        if doubted or known.seen() != before:
            self._tell()
        for name in set(held) - set(self._wanted):
            await self._forget(known, name, held[name])
        if known.state in UP:
            await self._fill(known, held)

    async def _fill(self, known: Known, held: dict[str, pb.LoadedPolicy]) -> None:
        """Loads what is missing, newest first. A recovering agent brings back by itself what it holds."""
        for name, published in reversed(list(self._wanted.items())):
            recovering = known.state == pb.ENGINE_STATE_RECOVERING and name in held
            trouble = known.trouble.get(name)
            due = trouble is None or asyncio.get_running_loop().time() >= trouble.not_before
            if name not in known.proved and not recovering and due:
                await self._load(known, published)

    async def _forget(self, known: Known, name: str, item: pb.LoadedPolicy) -> None:
        request = pb.RetirePolicyRequest(policy=item.policy)
        try:
            await call(
                known.stub.RetirePolicy,
                request,
                pb.RetirePolicyResponse,
                timeout=CALL_SECONDS,
                peer=known.entry.name,
                token=Secret.LEARNER_TO_INFERENCE.here(),
            )
        except KestrlError as error:
            log.warning("%s did not retire %s, it is asked again: %s", known.entry.name, name, error)

    async def _load(self, known: Known, published: Published) -> None:
        name = published.policy.name
        request = pb.LoadPolicyRequest(policy=policy_to_proto(published.policy), uri=published.uri)
        try:
            await asyncio.create_task(
                call(
                    known.stub.LoadPolicy,
                    request,
                    pb.LoadPolicyResponse,
                    timeout=LOAD_SECONDS,
                    peer=known.entry.name,
                    token=Secret.LEARNER_TO_INFERENCE.here(),
                ),
                context=published.context.copy(),
            )
        except KestrlError as error:
            self._quarantine(known, name, error.failure(component=known.entry.name))
        else:
            if name in self._wanted:
                known.proved.add(name)
                known.trouble.pop(name, None)
        self._tell()

    def _quarantine(self, known: Known, name: str, failure: Failure) -> None:
        if name not in self._wanted:
            return
        known.proved.discard(name)
        times = known.trouble[name].times + 1 if name in known.trouble else 1
        wait = min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** (times - 1))
        known.trouble[name] = Trouble(failure, times, asyncio.get_running_loop().time() + wait)
        self._progress.count_failure(failure)
        log.error("%s is quarantined for %s: %s", known.entry.name, name, failure)
