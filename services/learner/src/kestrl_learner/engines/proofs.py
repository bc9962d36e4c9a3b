"""When engines had proved each version, so that a turn is accepted of an engine that has left since. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from kestrl.episode import PolicyVersion


class Proofs:
    """The last interval in which each engine had proved each version."""

    def __init__(self) -> None:
        self._versions: dict[str, PolicyVersion] = {}
        """Versions that completions may name, retired or not."""
        self._until: dict[str, dict[str, float]] = {}
        """By version and engine, when its proof was lost; infinity while it holds."""

    def add(self, policy: PolicyVersion) -> None:
        """Adds a version that is published."""
        self._versions[policy.name] = policy

    def observe(self, proved: Mapping[str, Collection[str]], *, now: float) -> None:
        """Records which versions each engine has proved now.

        Args:
            proved: Names of versions by engine; one that is missing has none.
            now: Seconds of a steady clock.
        """
        for version, engines in self._until.items():
            for engine, until in engines.items():
                if until == inf and version not in proved.get(engine, ()):
                    engines[engine] = now
        for engine, versions in proved.items():
            for version in versions:
                self._until.setdefault(version, {})[engine] = inf

    def since(
        self, policy: PolicyVersion, began: float, *, newer: bool = False
    ) -> Mapping[PolicyVersion, frozenset[str]]:
        """Names of the engines that had proved a version at any time since `began`, by version.

        Args:
            policy: The version.
            began: By the clock of `observe`.
            newer: Whether all newer versions are among them.
        """
        newer_versions = [version for version in self._versions.values() if newer and version.step > policy.step]
        return {version: self._engines(version.name, began) for version in (policy, *newer_versions)}

    def _engines(self, version: str, began: float) -> frozenset[str]:
        return frozenset(engine for engine, until in self._until.get(version, {}).items() if until >= began)

    def forget(self, wanted: Collection[str], *, before: int) -> None:
        """Forgets the versions before the step `before` that no engine is to serve any more.

        Args:
            wanted: Names of the versions that engines are to serve.
            before: Step of the oldest version that completions may still name.
        """
        for name, policy in list(self._versions.items()):
            if name not in wanted and policy.step < before:
                del self._versions[name]
                self._until.pop(name, None)
