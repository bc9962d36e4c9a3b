"""How versions of vLLM differ in what starts them."""

from __future__ import annotations

import re
from typing import NamedTuple

TOKEN_ROUTES = (0, 30)
"""First version that serves its token routes only with `--enable-scale-out`; older ones do not know the option."""
SLOT_COUNTED = (0, 27)
"""First version in which a batch may use as many adapters as `--max-loras` says (vllm#47724)."""
VERSION = re.compile(r"(\d+)\.(\d+)")


class VersionFacts(NamedTuple):
    """What the start of an engine depends on."""

    token_routes: bool
    """Whether an option enables the routes that take token ids."""
    spare_slots: int
    """Adapter slots in addition to those that a batch may use."""


def version_facts(version: str | None) -> VersionFacts:
    """Facts of a version such as `0.25.1+cu130`; those of the newest one if it is not known."""
    match = VERSION.match(version or "")
    if match is None:
        return VersionFacts(token_routes=True, spare_slots=0)
    release = (int(match[1]), int(match[2]))
    return VersionFacts(token_routes=release >= TOKEN_ROUTES, spare_slots=0 if release >= SLOT_COUNTED else 1)
