"""Policy versions of an engine: downloads, loads, verifies, reloads after a restart, and retires them.

One lock per engine: loads and retirements are sequential, so that the state of this module matches the engine's list.
The files of an adapter are deleted after it is unloaded, since an engine exits when the files of a listed adapter are
missing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import BASE_MODEL_NAME, PolicyVersion
from kestrl.errors import Boundary, EngineFailure, Failure, FailureError, KestrlError, StorageError, UserInputError
from kestrl.storage import AdapterManifest, Probe
from kestrl.storage.adapters import largest_gap
from kestrl_inference.engine import Engine, EngineRefused
from kestrl_inference.fetch import fetch
from kestrl_inference.proof import ProbeComparison, compare
from kestrl_inference.sampling import sampling_failure

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WantedAdapter:
    """A version that the engine should serve."""

    policy: PolicyVersion
    folder: Path
    manifest: AdapterManifest
    fresh: bool = True
    """Whether the engine has not been asked to load it yet."""
    proved: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of a load."""

    gap: float
    fetch_seconds: float = 0.0
    load_seconds: float = 0.0
    prove_seconds: float = 0.0


class ProvedBuild(NamedTuple):
    """What answers."""

    engine: str
    version: str
    witness: str
    """What names the policy of a completion."""

    def __str__(self) -> str:
        return f"{self.engine} {self.version}; the {self.witness} names policies"


class LoadedAdapters:
    """The adapters of one engine."""

    def __init__(self, settings: AgentSettings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.held: dict[str, WantedAdapter] = {}
        self.last: Loaded | None = None
        """Result of the last load."""
        self.build: ProvedBuild | None = None
        """What answered the last verification."""
        self._folder = Path(settings.adapters_dir).resolve()  # the engine may have another working directory
        self._leaving: dict[str, Path] = {}
        """Retired versions, whose files are kept until the engine has unloaded them."""
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._draws_compared = settings.draws == 0
        """Whether what the engine draws was compared with a version's distribution since it started."""
        self._base_doubted = False
        """Whether the engine has slept since its base model was compared with a version's manifest."""
        self._lock = asyncio.Lock()

    def prepare(self) -> None:
        """Creates the folder of adapters.

        Raises:
            UserInputError: The folder cannot be created.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserInputError(f"adapters_dir: {self._folder} cannot be made: {error}") from error

    async def unload_earlier(self) -> None:
        """Unloads the adapters of an earlier agent and deletes their files; called before the first load.

        Raises:
            EngineFailure: The engine did not answer.
        """
        async with self._lock:
            for name, root in (await self.engine.adapters()).items():
                if Path(root).is_relative_to(self._folder):
                    log.info("%s is unloaded: it was loaded by an earlier agent", name)
                    await self.engine.unload(name)
            for folder in self._folder.iterdir():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def proved(self) -> frozenset[str]:
        """Names of the verified versions."""
        return frozenset(name for name, adapter in self.held.items() if adapter.proved)

    def settled(self) -> bool:
        """Whether every wanted version is verified or being loaded, and every other one is unloaded."""
        return not self._leaving and not self._unproved()

    def _unproved(self) -> list[WantedAdapter]:
        return [adapter for name, adapter in self.held.items() if not adapter.proved and name not in self._loading]

    async def load(self, policy: PolicyVersion, uri: str) -> Loaded:
        """Downloads, loads and verifies a version. A version that is already verified is only verified again.

        Concurrent callers for one version share the work, which continues if they are cancelled: an interrupted load
        would leave an unknown adapter in the engine.

        Raises:
            StorageError: It was not completely published, is corrupt, or is another version.
            EngineFailure: The engine refused it, or has no free slot.
            FailureError: The verification failed: `probe_failed`, `adapter_not_applied`, `other_version`,
                `sampling_differs`.
        """
        task = self._loading.get(policy.name)
        if task is None:
            task = asyncio.create_task(self._load(policy, uri), name=f"load-{policy.name}")
            self._loading[policy.name] = task
            task.add_done_callback(lambda ended_task: self._finished(policy.name, ended_task))
        return await asyncio.shield(task)

    def _finished(self, name: str, task: asyncio.Task[Loaded]) -> None:
        self._loading.pop(name, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("%s is not served: %s", name, error)

    async def _load(self, policy: PolicyVersion, uri: str) -> Loaded:
        name = policy.name
        async with self._lock:
            with span(SpanName.LOAD, {Attr.POLICY: name, Attr.ENGINE: self.settings.engine_name}):
                began = time.perf_counter()
                adapter = self.held.get(name)
                if adapter is None:
                    await self._sweep()
                    self._require_slot(policy)
                    manifest = await asyncio.to_thread(fetch, uri, policy, self._folder / name)
                    adapter = self.held[name] = WantedAdapter(policy, self._folder / name, manifest)
                elif adapter.policy != policy:
                    raise StorageError(f"{name} is loaded with a different digest than requested", code="wrong_policy")
                fetched = time.perf_counter()
                try:
                    await self._push(adapter)
                    pushed = time.perf_counter()
                    comparison = await self._prove(adapter)
                except KestrlError as error:
                    adapter.failure = error.failure(component=self.settings.component)
                    raise
                self.last = Loaded(
                    gap=comparison.gap,
                    fetch_seconds=fetched - began,
                    load_seconds=pushed - fetched,
                    prove_seconds=time.perf_counter() - pushed,
                )
                return self.last

    def _require_slot(self, policy: PolicyVersion) -> None:
        count = len(self.held)
        if count >= self.settings.slots:
            raise EngineFailure(
                f"{self.settings.engine_name} holds {count} versions and has no slot for {policy.name}; retire one "
                "first",
                code="no_free_slot",
                retryable=False,
            )

    async def _push(self, adapter: WantedAdapter) -> None:
        """Loads a version into the engine, unless it is already loaded.

        A new version is loaded without checking the engine's list, which would take as long again.

        Raises:
            EngineFailure: The engine refused the adapter, or uses the name for another folder.
        """
        name, folder = adapter.policy.name, str(adapter.folder)
        if not adapter.fresh and await self._root(name) == folder:
            return
        adapter.fresh = False
        try:
            await self.engine.load(name, folder)
        except EngineRefused as refused:
            root = await self._root(name)
            if root == folder:
                return
            error = refused if root is None else EngineRefused(409, f"the name is taken by {root}")
            self.held.pop(name, None)
            await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)
            raise self._refused(adapter, error) from error

    async def _root(self, name: str) -> str | None:
        """Folder of an adapter in the engine's list."""
        return (await self.engine.adapters()).get(name)

    def _refused(self, adapter: WantedAdapter, error: EngineRefused) -> EngineFailure:
        head = f"{self.settings.engine_name} refused {adapter.policy.name}"
        if self.engine.dialect.is_rank_too_high(error.answer):
            return EngineFailure(
                f"{head}: its rank {adapter.manifest.rank} is above the engine's limit; lower spec.model.adapter.rank "
                "or raise "
                f"spec.inference.args.max-lora-rank ({error})",
                code="rank_too_high",
                retryable=False,
            )
        return EngineFailure(f"{head} (rank {adapter.manifest.rank}): {error}", code="adapter_refused", retryable=False)

    async def _prove(self, adapter: WantedAdapter) -> ProbeComparison:
        """Verifies a version with its probe and one sampled token, the first one after a start of the engine with more
        draws, too; a version that fails is unloaded and removed.

        Raises:
            FailureError: The verification failed.
            EngineFailure: The engine's answers cannot be read (code `engine_nonsense`).
        """
        name = adapter.policy.name
        with span(SpanName.PROVE, {Attr.POLICY: name, Attr.ENGINE: self.settings.engine_name}):
            adapter.proved = False
            scores = await self.engine.score(name, adapter.manifest.probe.token_ids)
            await self.engine.sample(name, adapter.manifest.probe.token_ids)
            other_probes = {
                sibling_name: sibling.manifest.probe
                for sibling_name, sibling in self.held.items()
                if sibling_name != name
            }
            comparison = compare(
                name, self.settings.engine_name, adapter.manifest.probe, scores, self.settings.probe_bound, other_probes
            )
            if self._base_doubted:
                await self._prove_base(adapter.manifest.probe)
            failure = comparison.failure or await self._sampling_failure(adapter)
            adapter.proved, adapter.failure = failure is None, failure
            if failure is not None:
                log.error("%s%s", failure, self._other_base(adapter))
                await self._forget(adapter)
                raise FailureError(failure)
            self.build = ProvedBuild(self.engine.dialect.name, await self.engine.version(), self.engine.dialect.witness)
            log.info("%s is proved on %s, %s", name, self.settings.engine_name, self.build)
            return comparison

    async def _sampling_failure(self, adapter: WantedAdapter) -> Failure | None:
        """Why the engine does not sample from the distribution of a version; compared once per start of the engine."""
        if self._draws_compared:
            return None
        settings = self.settings
        failure = await sampling_failure(
            self.engine,
            settings.engine_name,
            adapter.policy.name,
            adapter.manifest.probe.token_ids,
            draws=settings.draws,
            seconds=settings.draw_seconds,
            bound=settings.probe_bound,
        )
        self._draws_compared = failure is None
        return failure

    def _other_base(self, adapter: WantedAdapter) -> str:
        """Possible reason of a failed probe. Not an error by itself, since a model may have two addresses."""
        theirs, ours = adapter.manifest.base_model, self.settings.base_model
        return "" if theirs == ours else f"; it was trained on {theirs}, this engine serves {ours}"

    async def _forget(self, adapter: WantedAdapter) -> None:
        """Removes a failed version; `settle` retries if unloading fails."""
        self._leave(adapter)
        try:
            await self._sweep()
        except EngineFailure as error:
            log.warning("%s is not unloaded yet: %s", adapter.policy.name, error)

    async def retire(self, policy: PolicyVersion) -> None:
        """Unloads a version, then deletes its files. It is retired immediately; `settle` retries if unloading fails.

        Raises:
            EngineFailure: The engine has not unloaded it yet.
        """
        async with self._lock:
            adapter = self.held.get(policy.name)
            if adapter is not None:
                self._leave(adapter)
            await self._sweep()

    def _leave(self, adapter: WantedAdapter) -> None:
        adapter.proved = False
        self.held.pop(adapter.policy.name, None)
        self._leaving[adapter.policy.name] = adapter.folder

    async def _sweep(self) -> None:
        """Unloads retired versions, then deletes their files.

        Raises:
            EngineFailure: The engine did not answer, or still lists a name (code `still_listed`). The files are kept.
        """
        for name, folder in list(self._leaving.items()):
            await self.engine.unload(name)
            if name in await self.engine.adapters():
                raise EngineFailure(
                    f"{self.settings.engine_name} still lists {name} after unloading", code="still_listed"
                )
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            del self._leaving[name]

    async def settle(self, *, lost: bool) -> None:
        """Loads and verifies wanted versions, and unloads retired ones. Failures are recorded for the next attempt.

        Args:
            lost: Whether the engine has restarted, so that no version is verified.
        """
        async with self._lock:
            if lost:
                self._draws_compared = self.settings.draws == 0
            for adapter in self.held.values():
                adapter.proved = adapter.proved and not lost
            try:
                await self._sweep()
            except EngineFailure as error:
                log.warning("%s: %s", self.settings.component, error)
            for adapter in self._unproved():
                try:
                    await self._push(adapter)
                    await self._prove(adapter)
                except KestrlError as error:
                    adapter.failure = error.failure(component=self.settings.component)
                    log.warning("%s is not verified on %s: %s", adapter.policy.name, self.settings.engine_name, error)

    async def quiet(self) -> None:
        """Waits until nothing is being loaded, verified or unloaded."""
        async with self._lock:
            pass

    async def prove_again(self) -> None:
        """Verifies every version, and the base model, in an engine that has slept: one of vLLM answered with corrupt
        adapters (its issue 53888).

        Raises:
            FailureError: It does not compute one of them as before.
            EngineFailure: It did not answer, or refused a version.
        """
        async with self._lock:
            self._base_doubted = True
            for adapter in list(self.held.values()):
                await self._push(adapter)
                await self._prove(adapter)

    async def _prove_base(self, probe: Probe) -> None:
        gap = largest_gap(await self.engine.score(BASE_MODEL_NAME, probe.token_ids), probe.base_logprobs)
        if gap > self.settings.probe_bound:
            raise FailureError(
                Failure(
                    boundary=Boundary.ENGINE,
                    code="base_changed",
                    message=f"{self.settings.engine_name} does not compute the base model as before it slept "
                    f"(probe gap {gap:.3g}, bound {self.settings.probe_bound:.3g})",
                    component=self.settings.engine_name,
                )
            )
        self._base_doubted = False

    def unprove(self, reason: str, *, asleep: bool = False) -> None:
        """Marks all versions as unverified because the engine sleeps, or stopped answering and may be another one when
        it answers again.
        """
        if not asleep:
            self._draws_compared = self.settings.draws == 0
        for adapter in self.held.values():
            adapter.proved = False
            adapter.failure = Failure(
                boundary=Boundary.ENGINE,
                code="engine_asleep" if asleep else "engine_down",
                message=reason,
                retryable=True,
                component=self.settings.component,
            )
