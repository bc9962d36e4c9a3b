"""References to secrets."""

from __future__ import annotations

from kestrl.spec.model import Model
from kestrl.spec.scalars import Name


class SecretRef(Model):
    """Reference to a secret, whose keys become environment variables of the processes that need it."""

    name: Name
    """Name of a Secret; on one machine, of the file `NAME.env` beside the manifest with one NAME=VALUE per line."""
