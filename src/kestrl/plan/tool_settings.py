"""Parts of the tool service's settings that one tool has."""

from __future__ import annotations

from kestrl.plan.service_settings import Model


class SecretText(Model):
    """A text with an entry of a secret."""

    variable: str
    """Environment variable with the entry."""
    prefix: str = ""
    """Text before it."""


class ClaimEntry(Model):
    """The warm pool from which a Python tool claims its sandboxes."""

    warm_pool: str
    token: SecretText
    port: int
    bind_seconds: float
    """Time in which a claim has to have a sandbox that answers."""
    use_seconds: float
    """Longest time for which one sandbox gets new runs."""
    keep_seconds: float
    """Time after which the cluster deletes a claim in any case."""
