"""Forms that answers of several engines have."""

from __future__ import annotations

import json
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
    """Metrics of a Prometheus page by name, summed over labels."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def labelled_sum(page: str, name: str, label: str) -> float:
    """A metric of a Prometheus page, summed over the lines that have a label such as `stage="prefill_forward"`."""
    lines = (line for line in page.splitlines() if line.startswith(f"{name}{{") and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)
