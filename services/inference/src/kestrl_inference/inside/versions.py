"""Facts of engines' versions: what an engine is started with, and who names the policy in its answers."""

from __future__ import annotations

import re
from typing import NamedTuple

Release = tuple[int, int]
NUMBER = re.compile(r"(\d+)\.(\d+)")
UNNUMBERED = (0, 1)
"""Number of a build that was made without the tags of its repository, such as 0.1.dev1+g1234567."""


class Facts(NamedTuple):
    """What differs between versions."""

    scale_out: bool
    """Whether the routes that take token ids are served only with `--enable-scale-out`; others do not know the
    option."""
    spare_slots: int
    """Adapter slots beyond those that a batch uses: vLLM before 0.27 may swap an adapter under a running request when a
    load evicts one in use (vllm#47724), and with a spare slot no load ever evicts."""
    names_policy: bool
    """Whether answers have the field `model`; otherwise the launcher restores it."""


TABLE: tuple[tuple[Release, Facts], ...] = (
    ((0, 23), Facts(scale_out=False, spare_slots=1, names_policy=False)),
    ((0, 25), Facts(scale_out=False, spare_slots=1, names_policy=True)),
    ((0, 27), Facts(scale_out=False, spare_slots=0, names_policy=True)),
    ((0, 30), Facts(scale_out=True, spare_slots=0, names_policy=True)),
)
"""Facts by the first release that they hold for."""
TRIED: dict[str, tuple[str, Release, Release]] = {
    "vllm": ("vLLM", TABLE[0][0], (0, 32)),
    "sglang": ("SGLang", (0, 5), (0, 5)),
}
"""Name of an engine, and the oldest and the newest release of it that were tried."""


def facts_of(version: str) -> Facts:
    """Facts of a version such as `0.25.1+cu130`: those of the newest one if it has no number, and of the oldest one if
    it is older.
    """
    release = _release(version)
    if release is None:
        return TABLE[-1][1]
    return next((facts for first, facts in reversed(TABLE) if release >= first), TABLE[0][1])


def doubt(engine: str, version: str) -> str:
    """Why a version of an engine may not work; empty for those that were tried."""
    name, oldest_tried, newest_tried = TRIED[engine]
    release = _release(version)
    tried = f"{oldest_tried[0]}.{oldest_tried[1]} to {newest_tried[0]}.{newest_tried[1]} were tried"
    if release is None:
        return f"{name} {version} has no release number: it is started as the newest known one is; {tried}"
    if release > newest_tried:
        return f"{name} {version} is newer than what is known: it is started as the newest known one is; {tried}"
    if release < oldest_tried:
        return f"{name} {version} is older than what is known: it is started as the oldest known one is; {tried}"
    return ""


def matches(version: str, requested: str) -> bool:
    """Whether a version is the wanted one: `0.32` stands for its patch releases and their builds."""
    return version == requested or f"{version.partition('+')[0]}.".startswith(f"{requested}.")


def _release(version: str) -> Release | None:
    number = NUMBER.match(version)
    release = None if number is None else (int(number[1]), int(number[2]))
    return None if release == UNNUMBERED else release
