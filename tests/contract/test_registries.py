"""Pages that are written by hand name every entry of the registries, and engines and losses have one set of names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from kestrl._shared.spec.algorithms import ADVANTAGES, LOSSES, PRESETS
from kestrl.agents.registry import BUILT_IN as LOOPS
from kestrl.engines import EngineName
from kestrl.engines.registry import DIALECTS
from kestrl.formats.registry import BUILT_IN as FORMATS
from kestrl.rewards.registry import BUILT_IN as REWARDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("rewards.md", REWARDS),
        ("data.md", [name for name, reward in REWARDS.items() if reward.compares]),
        ("agent-loops.md", LOOPS),
        ("templates.md", FORMATS),
        ("algorithms.md", [*ADVANTAGES, *LOSSES, *PRESETS]),
    ],
)
def test_a_page_names_every_entry(page: str, names: Iterable[str]) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_parameter_of_a_loss_is_on_its_page() -> None:
    text = (DOCS / "algorithms.md").read_text()
    parameters = [name for loss in LOSSES.values() if loss.config for name in loss.config.model_fields]
    assert [name for name in parameters if f"`{name}`" not in text] == []


def test_the_type_of_an_engines_name_has_those_of_the_registry() -> None:
    assert list(DIALECTS) == list(get_args(EngineName))
