"""When engines had proved each version, so that a turn is accepted of an engine that has left since. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf


class Proofs:
    """The last interval in which each engine had proved each version."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}
        """By version and engine, when its proof was lost; infinity while it holds."""

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

    def since(self, version: str, began: float) -> frozenset[str]:
        """The engines that had proved a version at any time since `began`."""
        return frozenset(engine for engine, until in self._until.get(version, {}).items() if until >= began)

    def forget(self, version: str) -> None:
        """Forgets a version that nothing samples from any more."""
        self._until.pop(version, None)
