"""The last observed state of one engine, and what it says of a policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kestrl._shared import engine_failure
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.learner import EngineEntry
from kestrl._shared.rpc import Channel, call
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.episode import PolicyVersion
from kestrl.errors import Failure, PlaceError, StorageInaccessible, StorageUnavailable
from kestrl.runstate.state import EngineBuild, EngineReport
from kestrl.runstate.states import EngineState, ServingState
from kestrl.runstate.work import EngineWork
from kestrl_learner.engines.admission import EngineLoad

Answer = TypeVar("Answer")
LONGEST_BUILD = 100
"""Characters of an engine's name or version."""
LONGEST_REASON = 500
STORAGE_AWAY = frozenset({StorageInaccessible.code, StorageUnavailable.code})
"""Codes of failures to fetch a version that say nothing of the version or the engine."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The failure of an engine to load a version."""

    failure: Failure
    times: int
    not_before: float
    """Earliest time of the next attempt by the loop's clock."""


@dataclass(slots=True, eq=False)
class KnownEngine:
    """Last observed state of one engine."""

    entry: EngineEntry
    stub: Any
    connection: Channel
    state: EngineState | None = None
    """State reported by the agent; None while the agent does not answer."""
    lost: bool = False
    """Whether the agent answered before and does not now."""
    suspected: bool = False
    """Whether a request to the engine failed since the last poll."""
    proved: set[str] = field(default_factory=set[str])
    newest: PolicyVersion | None = None
    """The newest version verified since the engine started, retired or not."""
    failure: Failure | None = None
    """The failure reported by the agent, or that of reaching the agent."""
    unproved: dict[str, Failure] = field(default_factory=dict[str, Failure])
    """By version, why the agent could not verify it anew."""
    load_failures: dict[str, LoadFailure] = field(default_factory=dict[str, LoadFailure])
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    load: EngineLoad = field(default_factory=EngineLoad)
    build: EngineBuild | None = None
    """What answered its last verification."""
    watching: asyncio.Task[None] | None = None
    caught_up: bool = False
    """Whether it has proved a version since it joined or came back, retired since or not: from then on publications
    wait for it."""

    async def ask(self, method: Any, request: Any, answer: type[Answer], seconds: float) -> Answer:
        """Calls a method of its agent.

        Raises:
            KestrlError: It failed, or did not answer in time.
        """
        token = Secret.LEARNER_TO_INFERENCE.here()
        return await call(method, request, answer, timeout=seconds, peer=self.entry.name, token=token)

    async def close(self) -> None:
        """Ends the watch of the engine and the connection to its agent."""
        if self.watching is not None:
            self.watching.cancel()
            await asyncio.wait([self.watching])
        await self.connection.close()

    def settled(self, name: str) -> bool:
        """Whether the engine's state for a version will not change soon."""
        away = self.lost or self.state in {EngineState.DOWN, EngineState.DRAINING}
        return away or name in self.proved or name in self.load_failures

    @property
    def leaving(self) -> bool:
        """Whether it drains: its turns are accepted, and it gets no further ones."""
        return self.state is EngineState.DRAINING

    def serves(self, name: str) -> bool:
        """Whether requests may name the engine for a version."""
        return name in self.proved and not self.leaving

    def storage_refused(self, name: str) -> bool:
        """Whether a version could not be stored beside the engine: its disk is full or not writable, and a person has
        to act.
        """
        return name in self.load_failures and self.load_failures[name].failure.code == PlaceError.code

    def storage_failure(self, name: str) -> Failure | None:
        """Why a version could not be fetched, if storage cannot be used: outside of the run, and for a while."""
        failed = self.load_failures.get(name)
        return failed.failure if failed is not None and failed.failure.code in STORAGE_AWAY else None

    @property
    def started(self) -> bool:
        """Whether its server has answered its agent since the agent began to watch it."""
        return self.state not in {None, EngineState.STARTING}

    @property
    def cannot_start(self) -> bool:
        """Whether its agent says that it never will."""
        return self.failure is not None and self.failure.code == engine_failure.CODE and not self.failure.retryable

    def hopeless(self, name: str) -> bool:
        """Whether the engine will never serve a version: it cannot load it or cannot start at all."""
        return self.cannot_start or (name in self.load_failures and not self.load_failures[name].failure.retryable)

    def snapshot(self) -> tuple[Any, ...]:
        """The part of the state whose changes are published."""
        return self.state, set(self.proved), self.failure, dict(self.unproved), self.build

    @property
    def up(self) -> bool:
        """Whether its agent reports that the engine answers."""
        return self.state is not None and self.state.up

    def serving_state(self, policy: PolicyVersion | None) -> ServingState:
        """The engine's state with respect to the newest published version."""
        if self.leaving:
            return ServingState.DRAINING
        if self.state is EngineState.ASLEEP:
            return ServingState.ASLEEP
        if not self.up:
            return ServingState.AWAY if self.lost or self.state is EngineState.DOWN else ServingState.STARTING
        if policy is None or policy.name in self.proved:
            return ServingState.SERVING
        if policy.name in self.load_failures:
            return ServingState.QUARANTINED
        return ServingState.RECOVERING if self.state is EngineState.RECOVERING else ServingState.LOADING

    def reason(self, policy: PolicyVersion | None) -> str:
        """Why the engine does not serve the newest version; empty if that is not known."""
        failed = None if policy is None else self.load_failures.get(policy.name)
        if self.up and failed is not None:
            return f"{failed.failure} (tried {failed.times}x)"
        failure = self.failure or (None if policy is None else self.unproved.get(policy.name))
        return "" if failure is None else str(failure)

    def update_newest(self, policies: Iterable[PolicyVersion]) -> None:
        """Updates `newest`; while the engine is not ready, only versions that were verified again count."""
        proved_policies = [policy for policy in policies if policy.name in self.proved]
        if self.state is EngineState.READY and self.newest is not None:
            proved_policies.append(self.newest)
        self.newest = max(proved_policies, key=lambda policy: policy.step, default=None)

    def report(self, policy: PolicyVersion | None) -> EngineReport:
        """The engine's entry in the run's progress."""
        state = self.serving_state(policy)
        return EngineReport(
            name=self.entry.name,
            policy=self.newest,
            lag=0 if policy is None else policy.step - (-1 if self.newest is None else self.newest.step),
            state=state,
            message="" if state is ServingState.SERVING else self.reason(policy)[:LONGEST_REASON],
            build=self.build,
        )

    def __str__(self) -> str:
        reason = "; ".join(str(failed.failure) for failed in self.load_failures.values()) or (
            self.failure and str(self.failure)
        )
        return f"{self.entry.name}: {reason or self.state or 'its agent has not answered'}"


def reported_load(answer: pb.GetEngineResponse) -> EngineLoad:
    """The load of an engine, as its agent reports it."""
    load = answer.load
    return EngineLoad(kv_usage=load.kv_usage, running=load.running, waiting=load.waiting, preemptions=load.preemptions)


def reported_build(answer: pb.GetEngineResponse) -> EngineBuild | None:
    """What answered the last verification, as the agent reports it; None before the first."""
    if not answer.HasField("build"):
        return None
    build = answer.build
    return EngineBuild(
        engine=build.engine[:LONGEST_BUILD],
        version=build.version[:LONGEST_BUILD],
        witness=build.witness[:LONGEST_BUILD],
    )


def reported_work(answer: pb.GetEngineResponse) -> EngineWork | None:
    """The counts of an engine's server, as its agent reports them; None while it does not."""
    if not answer.HasField("work") or not answer.HasField("idle"):
        return None
    return EngineWork(
        busy_seconds=max(0.0, answer.idle.observed - answer.idle.idle),
        prompt_tokens=answer.work.prompt_tokens,
        cached_tokens=answer.work.cached_tokens,
        sampled_tokens=answer.work.sampled_tokens,
        prefill_seconds=answer.work.prefill_seconds,
        decode_seconds=answer.work.decode_seconds,
    )
