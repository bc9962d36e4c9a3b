"""The parts of `benchmarks.gpu` by their letters; run by it as `python -m benchmarks.gpu.parts LETTER PLACE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Line, NotRun, not_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where parts run."""

    device: str
    quick: bool
    folder: Path
    """For models and runs."""

    def facts(self) -> dict[str, Any]:
        return {"device": self.device, "quick": self.quick, "folder": str(self.folder)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part."""

    title: str
    seconds: float
    """Time budget; the parts have ten minutes in all."""
    function: str
    """Module and name of its function, from a `Place` to lines."""


PARTS = {
    "a": Part(title="tests marked gpu", seconds=90, function="benchmarks.gpu.learner_parts:gpu_tests"),
    "b": Part(title="the learner's step", seconds=180, function="benchmarks.gpu.learner_parts:steps"),
    "c": Part(title="log-prob gap", seconds=75, function="benchmarks.gpu.engine_parts:gap"),
    "d": Part(title="publish to proved", seconds=75, function="benchmarks.gpu.engine_parts:publication"),
    "e": Part(title="engine with adapters", seconds=60, function="benchmarks.gpu.engine_parts:adapters_in_a_batch"),
    "f": Part(title="the memory plan's error", seconds=45, function="benchmarks.gpu.learner_parts:memory"),
    "g": Part(title="the quickstart on one device", seconds=90, function="benchmarks.gpu.engine_parts:quickstart"),
    "h": Part(title="two devices", seconds=30, function="benchmarks.gpu.learner_parts:two_devices"),
}


def lines_of(name: str, place: Place) -> Iterator[Line]:
    """What a part reports; a line that says why, if it cannot run here."""
    part = PARTS[name]
    module, _, function = part.function.partition(":")
    measure: Callable[[Place], Iterator[Line]] = getattr(import_module(module), function)
    try:
        yield from measure(place)
    except NotRun as reason:
        yield not_run(name, part.title, str(reason))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    for line in lines_of(sys.argv[1], Place(**given | {"folder": Path(given["folder"])})):
        print(line.text(), flush=True)
