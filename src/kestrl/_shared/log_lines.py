"""The log of a process: lines on stderr, without the credentials of its environment."""

from __future__ import annotations

import logging
import os
import sys

from kestrl.redaction import Redactor, credentials_of

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RedactedLines(logging.Formatter):
    """Lines without credentials, tracebacks included: libraries log what servers answer, too."""

    def __init__(self, form: str, redactor: Redactor) -> None:
        """Formats as `form` says, and removes what the redactor knows."""
        super().__init__(form)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(super().format(record))


def environment_redactor() -> Redactor:
    """Knows the credentials in the environment of this process."""
    return Redactor(credentials_of(os.environ))


def start_log(form: str = FORM) -> None:
    """Writes log lines from INFO on to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactedLines(form, environment_redactor()))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
