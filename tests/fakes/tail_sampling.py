"""The example of docs/telemetry.md for a collector that decides on whole traces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def tail_sampling() -> dict[str, Any]:
    """The processors of the example."""
    (example,) = re.findall(r"^```\n(processors:.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    processors: dict[str, Any] = yaml.safe_load(example)
    return processors
