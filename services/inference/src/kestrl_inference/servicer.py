"""The gRPC service of an engine agent; the work is done in `loaded_adapters` and `watch`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.rpc.codec import engine_state_to_proto
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import failure_to_proto, policy_from_proto, policy_to_proto
from kestrl.errors import UserInputError
from kestrl.runstate.states import EngineState
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.watch import Watch

JOB = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SHA256 = re.compile(r"[0-9a-f]{64}")


def _policy(message: Any) -> PolicyVersion:
    policy = policy_from_proto(message)
    if policy is None:
        raise UserInputError("policy: a version is required")
    if not JOB.fullmatch(policy.job) or policy.step < 0 or not SHA256.fullmatch(policy.sha256):
        # The name is used as the name of a folder, which is created and deleted.
        raise UserInputError(
            f"policy: job {policy.job!r}, step {policy.step}, sha256 {policy.sha256!r} name no version; "
            "job is a DNS label, step is not negative, and sha256 has 64 hex digits"
        )
    return policy


def patience(remaining: float | None, otherwise: float) -> float:
    """Seconds to wait for the engine: most of the caller's deadline, so that the failure arrives before it passes."""
    return otherwise if remaining is None else max(remaining - 1.0, remaining / 2)


class EngineAgentServicer(stubs.EngineAgentServiceServicer):
    """LoadPolicy, RetirePolicy, SleepEngine, WakeEngine, GetEngine."""

    def __init__(self, settings: AgentSettings, adapters: LoadedAdapters, watch: Watch) -> None:
        self._settings, self._adapters, self._watch = settings, adapters, watch

    async def LoadPolicy(self, request: pb.LoadPolicyRequest, context: Any) -> pb.LoadPolicyResponse:
        policy = _policy(request.policy)
        limit = patience(context.time_remaining(), self._settings.load_seconds)
        await self._watch.wait_until_up(limit)
        await self._watch.sleeper.wait_awake(limit)
        loaded = await self._adapters.load(policy, request.uri)
        return pb.LoadPolicyResponse(
            probe_gap=loaded.gap,
            fetch_seconds=loaded.fetch_seconds,
            load_seconds=loaded.load_seconds,
            prove_seconds=loaded.prove_seconds,
        )

    async def RetirePolicy(self, request: pb.RetirePolicyRequest, context: Any) -> pb.RetirePolicyResponse:
        await self._watch.sleeper.wait_awake(patience(context.time_remaining(), self._settings.load_seconds))
        await self._adapters.retire(_policy(request.policy))
        return pb.RetirePolicyResponse()

    async def SleepEngine(self, request: pb.SleepEngineRequest, context: Any) -> pb.SleepEngineResponse:
        limit = patience(context.time_remaining(), self._settings.load_seconds)
        await self._watch.sleeper.sleep(request.lease_seconds, limit)
        return pb.SleepEngineResponse()

    async def WakeEngine(self, request: pb.WakeEngineRequest, context: Any) -> pb.WakeEngineResponse:  # noqa: ARG002 - gRPC's
        await self._watch.sleeper.wake(patience(context.time_remaining(), self._settings.load_seconds))
        return pb.WakeEngineResponse()

    async def GetEngine(self, request: pb.GetEngineRequest, context: Any) -> pb.GetEngineResponse:  # noqa: ARG002 - gRPC's
        watch = self._watch
        if request.look:
            await watch.doubt()
        return pb.GetEngineResponse(
            name=self._settings.engine_name,
            url=self._settings.reported_url or self._settings.engine_url,
            state=engine_state_to_proto(watch.reported_state),
            policies=[
                pb.LoadedPolicy(
                    policy=policy_to_proto(adapter.policy),
                    # A verification that ended when the engine went down is not valid for the restarted engine.
                    proved=adapter.proved and watch.state is not EngineState.DOWN and not watch.sleeper.turn.shut,
                    failure=None if adapter.failure is None else failure_to_proto(adapter.failure),
                )
                for adapter in self._adapters.held.values()
            ],
            restarts=watch.restarts,
            failure=None if watch.failure is None else failure_to_proto(watch.failure),
            load=pb.EngineLoad(**asdict(watch.load)),
            idle=None if watch.idle is None else pb.EngineIdle(**watch.idle._asdict()),
            work=None if watch.work is None else pb.EngineWork(**asdict(watch.work)),
            build=None if self._adapters.build is None else pb.EngineBuild(**self._adapters.build._asdict()),
        )
