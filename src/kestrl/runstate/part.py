"""The base of everything that a run state is made of."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A frozen part of a run state. Unknown fields are ignored when it is read, and missing ones have defaults."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    def but(self, **fields: Any) -> Self:
        """A copy with other values of some fields."""
        unknown = fields.keys() - type(self).model_fields.keys()
        assert not unknown, f"{type(self).__name__} has no field {sorted(unknown)}"
        return self.model_copy(update=fields)
