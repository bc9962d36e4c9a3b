"""The versions that an engine is to serve: fetched, loaded, proved, re-pushed after a restart, retired.

One lock an engine: loads and retirements happen one after another, so that what the engine lists is what this module believes.
An adapter's files outlive its name: an engine that is asked for files that are gone ends.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from kestrl.episode import PolicyVersion
from kestrl.errors import Boundary, EngineFailure, Failure, FailureError, KestrlError, StorageError, UserInputError
from kestrl.plan.settings import AgentSettings
from kestrl.storage import AdapterManifest
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_inference.engine import Engine, EngineRefused
from kestrl_inference.fetch import fetch
from kestrl_inference.proof import Verdict, judge

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A version that is wanted on this engine."""

    policy: PolicyVersion
    folder: Path
    manifest: AdapterManifest
    fresh: bool = True
    """Whether the engine was never asked to load it."""
    proved: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How a load went."""

    gap: float
    fetch_seconds: float = 0.0
    load_seconds: float = 0.0
    prove_seconds: float = 0.0


class Policies:
    """The wanted versions of one engine."""

    def __init__(self, settings: AgentSettings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.held: dict[str, Held] = {}
        self.last: Loaded | None = None
        """How the newest load went."""
        self._folder = Path(settings.adapters_dir).resolve()  # the engine may run in another folder
        self._leaving: dict[str, Path] = {}
        """Versions that are wanted no more, whose files stay until the engine has let go of them."""
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._lock = asyncio.Lock()

    def prepare(self) -> None:
        """Makes the folder of adapters.

        Raises:
            UserInputError: It cannot be made.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserInputError(f"adapters_dir: {self._folder} cannot be made: {error}") from error

    async def start_afresh(self) -> None:
        """Before the first load: has the engine forget what an earlier agent loaded, then removes that one's files.

        Raises:
            EngineFailure: The engine did not answer.
        """
        async with self._lock:
            for name, root in (await self.engine.adapters()).items():
                if Path(root).is_relative_to(self._folder):
                    log.info("%s is unloaded: an earlier agent loaded it", name)
                    await self.engine.unload(name)
            for folder in self._folder.iterdir():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def proved(self) -> frozenset[str]:
        """Names of the versions that the engine has proved."""
        return frozenset(name for name, held in self.held.items() if held.proved)

    def settled(self) -> bool:
        """Whether every wanted version is proved, or a caller is having it proved now, and every other is gone."""
        return not self._leaving and not self._unproved()

    def _unproved(self) -> list[Held]:
        return [held for name, held in self.held.items() if not held.proved and name not in self._loading]

    async def load(self, policy: PolicyVersion, uri: str) -> Loaded:
        """Fetches, loads and proves a version. A version that is proved already is only proved again.

        Callers that ask for one version at a time share the work, and it goes on when they give up: a load that is cut in the
        middle would leave the engine with an adapter that nobody knows of.

        Raises:
            StorageError: It was never published whole, or is corrupt, or is not what was asked for.
            EngineFailure: The engine refused it, or has no slot.
            FailureError: The engine does not serve it: `probe_failed`, `adapter_not_applied`, `other_version`.
        """
        task = self._loading.get(policy.name)
        if task is None:
            task = asyncio.create_task(self._load(policy, uri), name=f"load-{policy.name}")
            self._loading[policy.name] = task
            task.add_done_callback(lambda done: self._finished(policy.name, done))
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
                held = self.held.get(name)
                if held is None:
                    await self._sweep()
                    self._require_slot(policy)
                    manifest = await asyncio.to_thread(fetch, uri, policy, self._folder / name)
                    held = self.held[name] = Held(policy, self._folder / name, manifest)
                elif held.policy != policy:
                    raise StorageError(f"{name} is held with other bytes than were asked for", code="wrong_policy")
                fetched = time.perf_counter()
                try:
                    await self._push(held)
                    pushed = time.perf_counter()
                    verdict = await self._prove(held)
                except KestrlError as error:
                    held.failure = error.failure(component=self.settings.component)
                    raise
                self.last = Loaded(
                    gap=verdict.gap,
                    fetch_seconds=fetched - began,
                    load_seconds=pushed - fetched,
                    prove_seconds=time.perf_counter() - pushed,
                )
                return self.last

    def _require_slot(self, policy: PolicyVersion) -> None:
        taken = len(self.held)
        if taken >= self.settings.slots:
            raise EngineFailure(
                f"{self.settings.engine_name} holds {taken} versions and has no slot for {policy.name}; retire one first",
                code="no_free_slot",
                retryable=False,
            )

    async def _push(self, held: Held) -> None:
        """Has the engine load a version under its own name, unless it has it already.

        One that was just fetched is loaded without a look at what the engine lists, which would cost as much again.

        Raises:
            EngineFailure: It refuses the adapter, or has given the name to another folder.
        """
        name, folder = held.policy.name, str(held.folder)
        if not held.fresh and await self._root(name) == folder:
            return
        held.fresh = False
        try:
            await self.engine.load(name, folder)
        except EngineRefused as refused:
            root = await self._root(name)
            if root == folder:
                return
            error = refused if root is None else EngineRefused(409, f"the name is taken by {root}")
            self.held.pop(name, None)
            await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)
            raise self._refused(held, error) from error

    async def _root(self, name: str) -> str | None:
        """The folder that the engine lists for a name."""
        return (await self.engine.adapters()).get(name)

    def _refused(self, held: Held, error: EngineRefused) -> EngineFailure:
        said = f"{self.settings.engine_name} refused {held.policy.name}"
        if "max_lora_rank" in str(error):
            return EngineFailure(
                f"{said}: its rank {held.manifest.rank} is above the engine's limit; lower spec.model.adapter.rank or raise "
                f"spec.inference.args.max-lora-rank ({error})",
                code="rank_too_high",
                retryable=False,
            )
        return EngineFailure(f"{said} (rank {held.manifest.rank}): {error}", code="adapter_refused", retryable=False)

    async def _prove(self, held: Held) -> Verdict:
        """Compares the probe; a version that fails is unloaded and forgotten, so that nothing can name it.

        Raises:
            FailureError: The engine does not serve it.
        """
        name = held.policy.name
        with span(SpanName.PROVE, {Attr.POLICY: name, Attr.ENGINE: self.settings.engine_name}):
            held.proved = False
            scores = await self.engine.score(name, held.manifest.probe.token_ids)
            others = {other: known.manifest.probe for other, known in self.held.items() if other != name}
            verdict = judge(
                name, self.settings.engine_name, held.manifest.probe, scores, self.settings.probe_bound, others
            )
            held.proved, held.failure = verdict.failure is None, verdict.failure
            if verdict.failure is not None:
                log.error("%s%s", verdict.failure, self._other_base(held))
                await self._forget(held)
                raise FailureError(verdict.failure)
            return verdict

    def _other_base(self, held: Held) -> str:
        """What may explain a failed probe. No refusal by itself: one model may lie at two addresses."""
        theirs, ours = held.manifest.base_model, self.settings.base_model
        return "" if theirs == ours else f"; it was trained on {theirs}, this engine serves {ours}"

    async def _forget(self, held: Held) -> None:
        """Drops a version that failed; an engine that does not let go of it now is asked again by `settle`."""
        self._leave(held)
        try:
            await self._sweep()
        except EngineFailure as error:
            log.warning("%s is not unloaded yet: %s", held.policy.name, error)

    async def retire(self, policy: PolicyVersion) -> None:
        """Unloads a version, then deletes its files. It counts as gone at once; `settle` tries again what fails here.

        Raises:
            EngineFailure: The engine did not let go of it yet.
        """
        async with self._lock:
            held = self.held.get(policy.name)
            if held is not None:
                self._leave(held)
            await self._sweep()

    def _leave(self, held: Held) -> None:
        held.proved = False
        self.held.pop(held.policy.name, None)
        self._leaving[held.policy.name] = held.folder

    async def _sweep(self) -> None:
        """Unloads what is leaving and deletes its files, in this order.

        Raises:
            EngineFailure: The engine did not answer, or still lists a name: code `still_listed`. The files stay.
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
        """Loads and proves what is wanted and not proved; lets go of what is leaving. Failures stay with the version, for a next try.

        Args:
            lost: Whether the engine is another process than before, so that nothing counts as proved.
        """
        async with self._lock:
            for held in self.held.values():
                held.proved = held.proved and not lost
            try:
                await self._sweep()
            except EngineFailure as error:
                log.warning("%s: %s", self.settings.component, error)
            for held in self._unproved():
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
