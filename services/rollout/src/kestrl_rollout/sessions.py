"""Which engine an episode's turns go to.

The first turn goes to the engine with the fewest active sessions, later turns to the same one, because it holds the prefix in its
cache. A session ends explicitly. It moves when its engine failed, or when that engine carries far more than another: the
cost of one prefill is then less than the wait. Never consistent hashing: it cannot see load.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

ESCAPE_SESSIONS = 8
"""An engine with no more sessions than this is never escaped from."""
ESCAPE_RATIO = 2
"""How many times another engine's sessions make an imbalance worth a lost prefix."""
AVOID_SECONDS = 5.0
"""How long an engine that failed gets no new session while another is at hand."""


class Sessions:
    """Active sessions by engine. Pure: time is given, nothing is awaited."""

    def __init__(self) -> None:
        self._engine: dict[str, str] = {}
        self._active: dict[str, int] = {}
        self._avoid_until: dict[str, float] = {}

    @property
    def count(self) -> int:
        """Sessions that have begun and not ended, on all engines."""
        return len(self._engine)

    def active(self, engine: str) -> int:
        return self._active.get(engine, 0)

    def place(self, session: str, engines: Sequence[str], *, now: float, exclude: Collection[str] = ()) -> str:
        """The engine for the session's next turn.

        Args:
            session: Any id; unknown ones begin a session.
            engines: Engines that serve the session's policy, in a stable order.
            now: Seconds of any steady clock.
            exclude: Engines that just failed this turn; used only if there is no other.
        """
        usable = [engine for engine in engines if engine not in exclude] or list(engines)
        rested = [engine for engine in usable if self._avoid_until.get(engine, now) <= now] or usable
        current = self._engine.get(session)
        if current in rested and not self._lopsided(current, rested):
            return current
        if current is not None:
            self.finish(session)
        chosen = min(rested, key=self.active)
        self._engine[session] = chosen
        self._active[chosen] = self.active(chosen) + 1
        return chosen

    def failed(self, engine: str, *, now: float) -> None:
        """The engine did not answer; others are preferred for a while."""
        self._avoid_until = {name: until for name, until in self._avoid_until.items() if until > now}
        self._avoid_until[engine] = now + AVOID_SECONDS

    def answered(self, engine: str) -> None:
        """The engine answered; it is as good as any."""
        self._avoid_until.pop(engine, None)

    def finish(self, session: str) -> None:
        """Ends a session; ending one twice is no error."""
        engine = self._engine.pop(session, None)
        if engine is None:
            return
        self._active[engine] -= 1
        if self._active[engine] == 0:
            del self._active[engine]

    def _lopsided(self, current: str, engines: Sequence[str]) -> bool:
        least = min(self.active(engine) for engine in engines)
        # Moving brings the other one nearer, so it must stay worth while after the move.
        return self.active(current) > ESCAPE_SESSIONS and self.active(current) > ESCAPE_RATIO * (least + 1)
