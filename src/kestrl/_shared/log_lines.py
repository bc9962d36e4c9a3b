"""The log of a process: lines on stderr, without the credentials of its environment."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from kestrl._shared.conventions import FORMAT_VARIABLE, LEVEL_VARIABLE
from kestrl.errors import UserInputError
from kestrl.redaction import Redactor, credentials_of

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TEXT, JSON = "text", "json"


class RedactedLines(logging.Formatter):
    """Lines without credentials, tracebacks included: libraries log what servers answer, too."""

    def __init__(self, form: str, redactor: Redactor) -> None:
        """Formats as `form` says, and removes what the redactor knows."""
        super().__init__(form)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(super().format(record))


class JsonLines(logging.Formatter):
    """A JSON object a line, without credentials: `time` (RFC 3339), `level`, `logger`, `message`, and `traceback` where
    there is one.
    """

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": self._redactor.text(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = self._redactor.text(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def environment_redactor() -> Redactor:
    """Knows the credentials in the environment of this process."""
    return Redactor(credentials_of(os.environ))


def start_log(form: str = FORM) -> None:
    """Writes log lines from INFO on to stderr, as JSON where `KESTRL_LOG_FORMAT` is `json`.

    Raises:
        UserInputError: The variable is neither `text` nor `json`.
    """
    redactor = environment_redactor()
    choice = os.environ.get(FORMAT_VARIABLE, TEXT)
    if choice not in {TEXT, JSON}:
        raise UserInputError(f"{FORMAT_VARIABLE}: {choice!r} is neither {TEXT} nor {JSON}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(redactor) if choice == JSON else RedactedLines(form, redactor))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def set_level(package: str) -> None:
    """Sets the level of a program's own loggers from `KESTRL_LOG_LEVEL`; libraries keep logging from INFO on.

    Raises:
        UserInputError: The variable names no level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise UserInputError(f"{LEVEL_VARIABLE}: {level!r} is not one of {', '.join(levels)}")
    logging.getLogger(package).setLevel(level)
