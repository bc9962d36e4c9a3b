"""Rules about what entries of a registry take as configuration, by the model that each entry brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from kestrl._shared.spec.algorithms import LOSSES, PRESETS
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl.rewards.registry import BUILT_IN


def reward_config_problems(spec: JobSpec) -> Iterator[Problem]:
    for index, reward in enumerate(spec.rewards):
        entry = BUILT_IN.get(reward.rule or "")
        if entry is not None:
            yield from config_problems(f"spec.rewards[{index}].config", str(reward.rule), entry.config, reward.config)


def loss_config_problems(spec: JobSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    preset = PRESETS.get(algorithm.name)
    if preset is None:
        if algorithm.loss_config:
            yield Problem("spec.algorithm.lossConfig", f"{algorithm.name} has its own loss; use algorithm.config")
        return
    name = algorithm.loss or preset.loss
    yield from config_problems("spec.algorithm.lossConfig", name, LOSSES[name].config, algorithm.loss_config)


def config_problems(
    path: str, name: str, model: type[BaseModel] | None, config: Mapping[str, Any], otherwise: str = ""
) -> Iterator[Problem]:
    """What a `config` has that an entry of a registry does not take.

    Args:
        path: The manifest's field.
        name: The entry's.
        model: The entry's model of a `config`; None if it takes none.
        config: The manifest's.
        otherwise: What else one can do than to remove a `config` that is not taken.
    """
    if model is None:
        if config:
            yield Problem(path, f"{name} takes no config; remove it{otherwise}")
        return
    try:
        model.model_validate(config)
    except ValidationError as error:
        errors = error.errors()
    else:
        return
    for detail in sorted(errors, key=lambda detail: detail["type"] != "extra_forbidden"):
        member = ".".join(map(str, detail["loc"]))
        if detail["type"] == "extra_forbidden":
            yield Problem(f"{path}.{member}", f"{name} takes no {member}; it takes {', '.join(model.model_fields)}")
        elif detail["type"] == "missing":
            yield Problem(f"{path}.{member}", "is required; add it")
        else:
            yield Problem(f"{path}.{member}", detail["msg"].removeprefix("Value error, "))
