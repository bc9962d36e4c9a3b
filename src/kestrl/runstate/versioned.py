"""JSON files with a version: each has one model, which reads every earlier version and refuses later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kestrl.errors import UserInputError
from kestrl.runstate.part import Part


class Versioned(Part):
    """A file's content.

    Raise `CURRENT`, and read the versions before, when the meaning of a field changes; a new field with a default needs
    no new version. Unknown fields are ignored: an earlier KestRL reads the files of a later one of the same version.
    """

    CURRENT: ClassVar[int] = 1
    NAME: ClassVar[str]
    """What the file is, for errors."""
    version: int = 1

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads the content of this version or an earlier one; without a version it is of version 1.

        Args:
            content: The JSON form.
            source: Where it was stored, for the error.

        Raises:
            UserInputError: It was written by a later version of KestRL.
            ValueError: It is malformed.
        """
        version = content.get("version", 1)
        if isinstance(version, int) and version > cls.CURRENT:
            raise UserInputError(
                f"{source} was written by a later version of KestRL: its {cls.NAME} has version {version}, and this "
                f"KestRL reads up to {cls.CURRENT}; use the later version, or start a new run"
            )
        return cls.model_validate({**content, "version": cls.CURRENT})

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.to_json(), indent=2)
