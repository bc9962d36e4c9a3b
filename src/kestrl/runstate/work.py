"""What the engines of a run did. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kestrl.runstate.part import Part

WORKING = 32
"""Engines whose work is kept by name."""
OTHERS = "others"
"""Name of the work of all further engines."""


class EngineWork(Part):
    """What one engine did: by its own counts, and by the turns of the episodes that it served."""

    busy_seconds: float = 0.0
    """Time in which it had a request."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all its requests, also those of judges and proofs."""
    cached_tokens: int = 0
    """Tokens of these that were taken from its prefix cache."""
    sampled_tokens: int = 0
    prefill_seconds: float = 0.0
    """Time in which prompts were computed, summed over requests."""
    decode_seconds: float = 0.0
    """Time in which tokens were sampled, summed over requests."""
    turn_tokens: int = 0
    """Tokens of the prompts of the episodes' turns."""
    repeated_tokens: int = 0
    """Tokens of these with which an earlier turn of the group had begun: what a prefix cache could have had at best,
    if one engine served the whole group, one turn after the other, and forgot nothing."""

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens per second with a request; None if it is not known how long it had one."""
        return self.sampled_tokens / self.busy_seconds if self.busy_seconds > 0 else None

    @property
    def prefill_share(self) -> float | None:
        """Share of its requests' time in which prompts were computed; None if the engine does not say."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.prefill_seconds / seconds if seconds > 0 else None

    @property
    def cached_share(self) -> float | None:
        """Share of the tokens of prompts that came from the prefix cache; None without prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def repeated_share(self) -> float | None:
        """The share that could have come from the prefix cache at best; None without turns."""
        return self.repeated_tokens / self.turn_tokens if self.turn_tokens else None

    def plus(self, other: EngineWork) -> EngineWork:
        """The sums of both."""
        return EngineWork(**{name: getattr(self, name) + getattr(other, name) for name in EngineWork.model_fields})

    def minus(self, earlier: EngineWork) -> EngineWork:
        """What has come to earlier counts."""
        return EngineWork(**{name: getattr(self, name) - getattr(earlier, name) for name in EngineWork.model_fields})


def summed(work: Mapping[str, EngineWork], more: Mapping[str, EngineWork]) -> dict[str, EngineWork]:
    """Work by engine with more of it; that of more than `WORKING` engines is under `OTHERS`."""
    sums = dict(work)
    for engine, added in more.items():
        name = engine if engine in sums or len(sums) < WORKING else OTHERS
        sums[name] = sums.get(name, EngineWork()).plus(added)
    return sums
