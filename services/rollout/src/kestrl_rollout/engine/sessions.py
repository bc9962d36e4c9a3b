"""Placement of episodes on engines.

The first turn goes to the engine with the fewest active sessions, later turns to the same one, which holds the prefix
in its cache. A session ends explicitly. It moves when its engine failed, or when that engine has far more sessions than
another: a prefill then costs less than the wait. Consistent hashing is not used because it ignores load.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

ESCAPE_SESSIONS = 8
"""Sessions of an engine up to which no session moves away from it."""
ESCAPE_RATIO = 2
"""Ratio of sessions between two engines above which a session moves."""
AVOID_SECONDS = 5.0
"""Time for which an engine that failed gets no new session if there is another."""


class SessionsByEngine:
    """Active sessions by engine. Pure: time is passed in, nothing is awaited."""

    def __init__(self) -> None:
        self._engine: dict[str, str] = {}
        self._active: dict[str, int] = {}
        self._avoid_until: dict[str, float] = {}

    @property
    def count(self) -> int:
        """Active sessions on all engines."""
        return len(self._engine)

    def active(self, engine: str) -> int:
        return self._active.get(engine, 0)

    def place(self, session: str, engines: Sequence[str], *, now: float, exclude: Collection[str] = ()) -> str:
        """The engine for the session's next turn.

        Args:
            session: Session id; an unknown one begins a session.
            engines: Engines that serve the session's policy, in a stable order.
            now: Seconds of any steady clock.
            exclude: Engines that failed this turn; used only if there is no other.
        """
        usable = [engine for engine in engines if engine not in exclude] or list(engines)
        rested = [engine for engine in usable if self._avoid_until.get(engine, now) <= now] or usable
        current = self._engine.get(session)
        if current in rested and not self._imbalanced(current, rested):
            return current
        if current is not None:
            self.finish(session)
        target = min(rested, key=self.active)
        self._engine[session] = target
        self._active[target] = self.active(target) + 1
        return target

    def failed(self, engine: str, *, now: float) -> None:
        """Records a failure: other engines are preferred for `AVOID_SECONDS`."""
        self._avoid_until = {name: until for name, until in self._avoid_until.items() if until > now}
        self._avoid_until[engine] = now + AVOID_SECONDS

    def answered(self, engine: str) -> None:
        """Records an answer: the engine is no longer avoided."""
        self._avoid_until.pop(engine, None)

    def finish(self, session: str) -> None:
        """Ends a session; a second call has no effect."""
        engine = self._engine.pop(session, None)
        if engine is None:
            return
        self._active[engine] -= 1
        if self._active[engine] == 0:
            del self._active[engine]

    def _imbalanced(self, current: str, engines: Sequence[str]) -> bool:
        fewest = min(self.active(engine) for engine in engines)
        # The move must still pay off after it has changed the counts.
        return self.active(current) > ESCAPE_SESSIONS and self.active(current) > ESCAPE_RATIO * (fewest + 1)
