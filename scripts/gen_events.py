"""Generates docs/events.schema.json, the JSON schema of a run's stored events, from the models of `kestrl.runstate`.

With `--check` it reports a stale file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic.json_schema import models_json_schema

from kestrl.runstate.log import Entry
from kestrl.runstate.segments import SegmentHeader

SCHEMA = Path(__file__).parents[1] / "docs" / "events.schema.json"


def schema() -> str:
    """The schema: each line of a segment is a header or an entry."""
    _, definitions = models_json_schema([(SegmentHeader, "serialization"), (Entry, "serialization")])
    definitions["$defs"]["SegmentHeader"]["required"] = ["version", "state"]
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Line of events/NUMBER-OWNER.jsonl",
        "description": "The first line is a SegmentHeader, every other an Entry.",
        "anyOf": [{"$ref": "#/$defs/SegmentHeader"}, {"$ref": "#/$defs/Entry"}],
        **definitions,
    }
    return json.dumps(content, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        SCHEMA.write_text(schema(), encoding="utf-8")
        return 0
    if not SCHEMA.exists() or SCHEMA.read_text(encoding="utf-8") != schema():
        print(f"{SCHEMA} is stale: make gen")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
