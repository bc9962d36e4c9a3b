"""Entries of the user's Secrets, such as API keys: read when they are used, so that a changed one is in force at once.

On a cluster they are files of a mounted volume, named as the variables that carry them elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kestrl.redaction import Redactor

FOLDER_VARIABLE = "KESTRL_USER_SECRETS"
"""Environment variable with the folder."""
REMEMBERED = 8
"""Number of values of each credential that are taken out of texts: the present one and those before it."""


def user_secret(variable: str) -> str | None:
    """The present value of a credential; None if there is none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        try:
            return (Path(folder) / variable).read_text("utf-8", "replace").rstrip("\r\n")
        except (FileNotFoundError, NotADirectoryError):
            pass  # of a Secret that was deleted, or of the job: variables are as the container began with them
    return os.environ.get(variable)


class PresentRedactor(Redactor):
    """Replaces credentials in texts as they are now and were before."""

    def __init__(self, current_secrets: Callable[[], Iterable[str]]) -> None:
        """Knows what `current_secrets` gives, now and whenever a text is given."""
        self._read, self._known = current_secrets, [tuple(current_secrets())]
        super().__init__(self._known[0])

    def text(self, text: str) -> str:
        self._look()
        return super().text(text)

    def found_in(self, text: str) -> bool:
        self._look()
        return super().found_in(text)

    def value(self, value: Any) -> Any:
        self._look()
        return super().value(value)

    def _look(self) -> None:
        secrets = tuple(self._read())
        if secrets != self._known[-1]:
            self._known = [*self._known[1 - REMEMBERED :], secrets]
            super().__init__(secret for secrets_of_name in self._known for secret in secrets_of_name)
