"""Numbers of records and settings of manifests as flat names. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record, with the names of objects around them: `gap/mean`. Its step is no metric."""
    for name, content in record.items():
        if isinstance(content, Mapping):
            yield from numbers_of(cast("Mapping[str, Any]", content), f"{prefix}{name}/")
        elif name != "step" and _is_number(content):
            yield prefix + name, float(content)


def _is_number(content: Any) -> bool:
    return isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content)


def settings_of(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a manifest by path: `algorithm.groupSize`. Lists are JSON."""
    for name, content in spec.items():
        if isinstance(content, Mapping):
            yield from settings_of(cast("Mapping[str, Any]", content), f"{prefix}{name}.")
        elif content is not None:
            yield prefix + name, content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
