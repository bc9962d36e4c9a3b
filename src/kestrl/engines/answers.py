"""Forms that answers of several engines have."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from kestrl.tools.shapes import is_mapping

EXCERPT = 200


def json_object(answer: bytes) -> Mapping[str, Any]:
    """An answer that is a JSON object.

    Raises:
        ValueError: It is none.
    """
    try:
        document: Any = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"not JSON: {answer[:EXCERPT]!r}") from error
    if not is_mapping(document):
        raise ValueError(f"not a JSON object: {answer[:EXCERPT]!r}")
    return document


def listed_adapters(answer: bytes, base: str) -> dict[str, str]:
    """Folders of the adapters that OpenAI's route `/v1/models` lists, by name.

    Args:
        answer: The body.
        base: Name of the base model, which is left out.

    Raises:
        ValueError: It has an unknown form.
    """
    models = json_object(answer)
    try:
        return {str(model["id"]): str(model["root"]) for model in models["data"] if model["id"] != base}
    except (KeyError, TypeError) as error:
        raise ValueError(f"/v1/models has an unknown form: {error!r}") from error


def metric_sums(page: str, names: Collection[str]) -> dict[str, float]:
    """Metrics of a Prometheus page by name, summed over labels.

    Raises:
        ValueError: One is no finite number.
    """
    sums: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            sums[name] = _finite(sums.get(name, 0.0) + _sample(line), name)
    return sums


def labelled_sum(page: str, name: str, label: str) -> float:
    """A metric of a Prometheus page, summed over the lines that have a label such as `stage="prefill_forward"`.

    Raises:
        ValueError: One is no finite number.
    """
    lines = (line for line in page.splitlines() if line.startswith(f"{name}{{") and label in line)
    return _finite(sum(map(_sample, lines)), name)


def _sample(line: str) -> float:
    """The number at the end of a line of a Prometheus page."""
    return float(line.rpartition(" ")[2])


def _finite(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise ValueError(f"the metric {name} is {number}, no finite number")
    return number
