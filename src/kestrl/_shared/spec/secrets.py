"""References to secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kestrl._shared.spec.model import Model
from kestrl._shared.spec.scalars import Name

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,252}$")]


class SecretRef(Model):
    """Reference to a secret, whose keys become environment variables of the processes that need it."""

    name: Name
    """Name of a Secret; on one machine, of the file `NAME.env` beside the manifest with one NAME=VALUE per line."""


class SecretValue(Model):
    """One entry of a secret, as a value."""

    secret_ref: SecretRef
    """Secret with the value; on one machine the file `NAME.env` beside the manifest."""
    secret_key: VariableName
    """Entry of the secret that holds the value."""
    prefix: Annotated[str, Field(max_length=64)] = ""
    """Text before the value, such as `Bearer ` with its space."""
