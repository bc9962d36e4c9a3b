"""The built-in algorithms as data: the parts of an algorithm by name, and the presets that bundle them.

The learner implements each part under the same name; a contract test compares the two lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "maxrl")
LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "dppo_tv")
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named bundle of parts and their settings; the manifest overrides each."""

    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dynamic_sampling: bool = False
    """Groups with equal rewards are replaced."""
    source: str
    """Paper or implementation that the bundle follows."""


PRESETS: dict[str, Preset] = {
    "grpo": Preset(source="arXiv 2402.03300, with the token mean and clip-higher of DAPO (arXiv 2503.14476)"),
    "dapo": Preset(dynamic_sampling=True, source="arXiv 2503.14476"),
    "dr_grpo": Preset(
        advantage="dr_grpo",
        aggregation="seq_mean_token_sum_norm",
        clip_high=0.2,
        source="arXiv 2503.20783",
    ),
    "gspo": Preset(
        loss="gspo",
        aggregation="seq_mean_token_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        source="arXiv 2507.18071",
    ),
    "cispo": Preset(
        loss="cispo", clip_low=1.0, clip_high=4.0, source="arXiv 2506.13585; the bounds are ART's, clip(ratio, 0, 5)"
    ),
    "rloo": Preset(advantage="rloo", source="arXiv 2402.14740"),
    "reinforce++": Preset(
        advantage="reinforce++", clip_high=0.2, source="arXiv 2501.03262, the variant with a group baseline"
    ),
}

_IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
_PATTERN = rf"^({'|'.join(re.escape(name) for name in PRESETS)}|{_IMPORT_PATH})$"


def one_of(names: Sequence[str]) -> Any:
    """Annotations of a string field that takes one of these names."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is unknown; use one of {', '.join(names)}")
        return value

    return (AfterValidator(check), WithJsonSchema({"type": "string", "enum": list(names)}))


def _check_name(value: str) -> str:
    if not re.match(_PATTERN, value):
        raise ValueError(
            f"{value!r} is neither a preset ({', '.join(PRESETS)}) nor a class by import path (module:Class)"
        )
    return value


AlgorithmName = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": _PATTERN})]
AdvantageName = Annotated[str, *one_of(ADVANTAGES)]
LossName = Annotated[str, *one_of(LOSSES)]
AggregationName = Annotated[str, *one_of(AGGREGATIONS)]
KlEstimatorName = Annotated[str, *one_of(KL_ESTIMATORS)]
