"""The schema of stored events is that of the code, and holds for what is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kestrl.runstate import events
from kestrl.runstate.log import Entry
from kestrl.runstate.segments import Segment, SegmentHeader

ROOT = Path(__file__).parents[2]


def test_the_schema_is_current() -> None:
    check = subprocess.run(
        [sys.executable, "scripts/gen_events.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_schema_takes_segments_and_nothing_else() -> None:
    schema = json.loads((ROOT / "docs/events.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    validator: Any = Draft202012Validator(schema)
    entry = Entry(number=1, at=1.0, event=events.FailureCounted(boundary="tool", code="tool_raised"))
    for line in Segment(1, 1, SegmentHeader(), ()).with_entries([entry]).content.splitlines():
        validator.validate(json.loads(line))
    assert not validator.is_valid({"number": 1, "at": 1.0, "event": {"kind": "failure_counted", "boundary": 3}})
