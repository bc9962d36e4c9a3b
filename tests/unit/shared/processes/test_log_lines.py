"""The log of a process as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

PROGRAM = """
import logging
from kestrl._shared.log_lines import set_level, start_log

start_log()
set_level("kestrl_learner")
log = logging.getLogger("kestrl_learner.run")
log.debug("key %s", "secret-of-the-storage")
try:
    raise ValueError("secret-of-the-storage")
except ValueError:
    log.exception("two\\nlines")
"""


def ended(form: str, level: str = "DEBUG") -> subprocess.CompletedProcess[str]:
    variables = {"KESTRL_LOG_FORMAT": form, "KESTRL_LOG_LEVEL": level, "AWS_SECRET_ACCESS_KEY": "secret-of-the-storage"}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_each_record_is_a_json_object_without_credentials() -> None:
    debug, error = (json.loads(line) for line in ended("json").stderr.splitlines())
    assert (debug["level"], debug["logger"]) == ("DEBUG", "kestrl_learner.run")
    assert datetime.fromisoformat(debug["time"]).tzinfo is not None
    assert error["message"] == "two\nlines"
    assert "ValueError" in error["traceback"]
    assert "secret-of-the-storage" not in json.dumps([debug, error])


@pytest.mark.parametrize(
    ("form", "level", "message"),
    [
        ("xml", "INFO", "KESTRL_LOG_FORMAT: 'xml' is neither"),
        ("text", "LOUD", "KESTRL_LOG_LEVEL: 'LOUD' is not one of"),
    ],
)
def test_another_form_or_level_is_refused(form: str, level: str, message: str) -> None:
    assert message in ended(form, level).stderr
