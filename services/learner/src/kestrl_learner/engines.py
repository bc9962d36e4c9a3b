"""The engines as the learner sees them: which have proved which version, by their agents' own word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, Failure, KestrlError
from kestrl.plan.settings import EngineEntry
from kestrl.rpc import Channel, call, channel
from kestrl.rpc.codec import failure_from_proto, policy_from_proto, policy_to_proto
from kestrl_learner.progress import Progress

log = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
CALL_SECONDS = 10.0
LOAD_SECONDS = 120.0


def _nobody() -> None:
    """Nobody listens yet."""


class NoEngineProved(KestrlError):
    """No engine serves the version: nothing may be named in a request."""

    boundary = Boundary.ENGINE
    code = "no_engine_proved"


@dataclass(slots=True)
class Known:
    """What is known of one engine."""

    entry: EngineEntry
    stub: stubs.EngineAgentServiceAsyncStub
    connection: Channel
    proved: set[str] = field(default_factory=set[str])
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """A version and where it lies."""

    policy: PolicyVersion
    uri: str


class Engines:
    """All engines of the job."""

    def __init__(self, entries: tuple[EngineEntry, ...], progress: Progress, start_seconds: float) -> None:
        self._known: list[Known] = []
        for entry in entries:
            connection = channel(entry.agent_address)
            self._known.append(Known(entry, stubs.EngineAgentServiceStub(connection), connection))  # type: ignore[arg-type]
        self._progress, self._start_seconds = progress, start_seconds
        self._wanted: dict[str, Published] = {}
        self.on_change: Callable[[], None] = _nobody

    async def close(self) -> None:
        for known in self._known:
            await known.connection.close()

    def proved(self, policy: PolicyVersion) -> list[EngineEntry]:
        """The engines that have proved a version, now."""
        return [known.entry for known in self._known if policy.name in known.proved]

    def wanted(self) -> set[str]:
        """Names of the versions that are published and not retired."""
        return set(self._wanted)

    def published(self, name: str) -> bool:
        """Whether this learner published a version and has not retired it."""
        return name in self._wanted

    async def publish(self, policy: PolicyVersion, uri: str, *, first: bool = False) -> list[EngineEntry]:
        """Has every engine load and prove a version; returns those that did. The others are tried again by `watch`.

        Raises:
            NoEngineProved: None did.
        """
        published = Published(policy, uri)
        self._wanted[policy.name] = published
        seconds = self._start_seconds if first else LOAD_SECONDS
        async with asyncio.TaskGroup() as tasks:
            for known in self._known:
                tasks.create_task(self._load(known, published, seconds, wait=first))
        proved = self.proved(policy)
        self._report(policy)
        if not proved:
            reasons = "; ".join(str(known.failure) for known in self._known if known.failure)
            raise NoEngineProved(f"no engine serves {policy.name}: {reasons}")
        return proved

    async def _load(self, known: Known, published: Published, seconds: float, *, wait: bool) -> None:
        request = pb.LoadPolicyRequest(policy=policy_to_proto(published.policy), uri=published.uri)
        try:
            await call(
                known.stub.LoadPolicy, request, pb.LoadPolicyResponse, timeout=seconds, peer=known.entry.name, wait=wait
            )
        except KestrlError as error:
            known.proved.discard(published.policy.name)
            known.failure = error.failure(component=known.entry.name)
            self._progress.count_failure(known.failure)
            log.error("%s is quarantined for %s: %s", known.entry.name, published.policy.name, known.failure)
            return
        known.proved.add(published.policy.name)
        known.failure = None

    def _report(self, policy: PolicyVersion) -> None:
        self._progress.update(policy=policy, engines_converged=len(self.proved(policy)))
        self.on_change()

    async def retire(self, names: set[str]) -> None:
        """Has every engine forget versions that nothing names any more. An agent that is gone has forgotten by itself."""
        for name in names & set(self._wanted):
            policy = self._wanted.pop(name).policy
            for known in self._known:
                known.proved.discard(name)
                request = pb.RetirePolicyRequest(policy=policy_to_proto(policy))
                try:
                    await call(
                        known.stub.RetirePolicy,
                        request,
                        pb.RetirePolicyResponse,
                        timeout=CALL_SECONDS,
                        peer=known.entry.name,
                    )
                except KestrlError as error:
                    log.warning("%s did not retire %s: %s", known.entry.name, name, error)

    async def watch(self) -> None:
        """Looks at every engine again and again; what has not proved a wanted version is told to load it again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for known in self._known:
                await self._look(known)
            if self._progress.policy is not None:
                self._report(self._progress.policy)

    async def _look(self, known: Known) -> None:
        try:
            seen = await call(
                known.stub.GetEngine,
                pb.GetEngineRequest(),
                pb.GetEngineResponse,
                timeout=CALL_SECONDS,
                peer=known.entry.name,
            )
        except KestrlError as error:
            known.proved.clear()
            known.failure = error.failure(component=known.entry.name)
            return
        held = {
            policy.name: item.proved for item in seen.policies if (policy := policy_from_proto(item.policy)) is not None
        }
        known.failure = failure_from_proto(seen.failure) if seen.HasField("failure") else None
        known.proved = {name for name, proved in held.items() if proved and name in self._wanted}
        if seen.state == pb.ENGINE_STATE_READY:
            for name, published in list(self._wanted.items()):
                if name not in held:  # the agent itself is new, or refused it before
                    await self._load(known, published, LOAD_SECONDS, wait=False)
