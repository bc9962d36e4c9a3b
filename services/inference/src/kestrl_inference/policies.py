"""The versions that an engine is to serve: fetched, loaded, proved, re-pushed after a restart, retired.

One lock a engine: loads and retirements happen one after another, so that what the engine lists is what this module believes.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, EngineFailure, Failure, FailureError, KestrlError, StorageError
from kestrl.plan.settings import AgentSettings
from kestrl.storage import AdapterManifest, fetch_adapter, open_store
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_inference.engine import Engine, EngineRefused
from kestrl_inference.proof import Verdict, judge

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A version that is wanted on this engine."""

    policy: PolicyVersion
    folder: Path
    manifest: AdapterManifest
    proved: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How a load went."""

    gap: float
    fetch_seconds: float = 0.0
    load_seconds: float = 0.0
    prove_seconds: float = 0.0


@dataclass(slots=True)
class Policies:
    """The wanted versions of one engine."""

    settings: AgentSettings
    engine: Engine
    held: dict[str, Held] = field(default_factory=dict[str, Held])
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def clean(self) -> None:
        """Removes what an earlier agent left: nobody names those folders any more."""
        folder = Path(self.settings.adapters_dir)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    async def load(self, policy: PolicyVersion, uri: str) -> Loaded:
        """Fetches, loads and proves a version. A version that is proved already is only proved again.

        Raises:
            StorageError: It was never published whole, or is corrupt, or is not what was asked for.
            EngineFailure: The engine refused it, has no slot, or does not serve it.
        """
        async with self._lock:
            with span(SpanName.LOAD, {Attr.POLICY: policy.name, Attr.ENGINE: self.settings.engine_name}):
                began = time.perf_counter()
                held = self.held.get(policy.name)
                if held is None:
                    self._require_slot(policy)
                    held = await self._fetch(policy, uri)
                fetched = time.perf_counter()
                await self._push(held)
                pushed = time.perf_counter()
                verdict = await self._prove(held)
                return Loaded(
                    gap=verdict.gap,
                    fetch_seconds=fetched - began,
                    load_seconds=pushed - fetched,
                    prove_seconds=time.perf_counter() - pushed,
                )

    def _require_slot(self, policy: PolicyVersion) -> None:
        if len(self.held) >= self.settings.slots:
            raise EngineFailure(
                f"{self.settings.engine_name} holds {len(self.held)} versions and has no slot for {policy.name}; retire one first",
                code="no_free_slot",
                retryable=False,
            )

    async def _fetch(self, policy: PolicyVersion, uri: str) -> Held:
        target = Path(self.settings.adapters_dir) / policy.name
        manifest = await asyncio.to_thread(lambda: fetch_adapter(open_store(uri), target))
        if manifest.policy != policy:
            shutil.rmtree(target, ignore_errors=True)
            raise StorageError(f"{uri} holds {manifest.policy.name}, not {policy.name}", code="wrong_policy")
        return Held(policy=policy, folder=target, manifest=manifest)

    async def _push(self, held: Held) -> None:
        """Has the engine load a version under its own name, unless it lists it already."""
        name = held.policy.name
        if name not in await self.engine.adapters():
            try:
                await self.engine.load(name, str(held.folder))
            except EngineRefused as error:
                shutil.rmtree(held.folder, ignore_errors=True)
                self.held.pop(name, None)
                raise EngineFailure(
                    f"{self.settings.engine_name} refused {name} (rank {held.manifest.rank}): {error}",
                    code="adapter_refused",
                    retryable=False,
                ) from error
        self.held[name] = held

    async def _prove(self, held: Held) -> Verdict:
        """Compares the probe; a version that fails is unloaded and forgotten, so that nothing can name it.

        Raises:
            FailureError: The engine does not serve it.
        """
        name = held.policy.name
        with span(SpanName.PROVE, {Attr.POLICY: name, Attr.ENGINE: self.settings.engine_name}):
            held.proved = False
            scores = await self.engine.score(name, held.manifest.probe.token_ids)
            verdict = judge(name, self.settings.engine_name, held.manifest.probe, scores, self.settings.probe_bound)
            held.proved, held.failure = verdict.failure is None, verdict.failure
            if verdict.failure is not None:
                log.error("%s", verdict.failure)
                await self._drop(held)
                raise FailureError(verdict.failure)
            return verdict

    async def retire(self, policy: PolicyVersion) -> None:
        """Unloads a version, then deletes its files: an engine that is asked for missing files ends."""
        async with self._lock:
            held = self.held.get(policy.name)
            if held is not None:
                held.proved = False
                await self._drop(held)

    async def _drop(self, held: Held) -> None:
        await self.engine.unload(held.policy.name)
        self.held.pop(held.policy.name, None)
        await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)

    async def recover(self) -> None:
        """After the engine came back without its adapters: loads and proves every wanted version again.

        A version that cannot be brought back stays wanted and unproved, with the reason; the next look tries again.
        """
        async with self._lock:
            for held in list(self.held.values()):
                held.proved = False
            for held in list(self.held.values()):
                try:
                    await self._push(held)
                    await self._prove(held)
                except KestrlError as error:
                    held.failure = error.failure(component=self.settings.component)
                    log.warning("%s is not proved on %s: %s", held.policy.name, self.settings.engine_name, error)

    def unprove(self, reason: str) -> None:
        """The engine stopped answering: nothing counts as proved until it is proved again."""
        for held in self.held.values():
            held.proved = False
            held.failure = Failure(
                boundary=Boundary.ENGINE,
                code="engine_down",
                message=reason,
                retryable=True,
                component=self.settings.component,
            )
