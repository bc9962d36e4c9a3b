"""Every example for accelerators runs on a cluster as it is, or says what to put into storage for that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from kestrl._shared.plan.components import Role
from kestrl._shared.prepare import check_addresses
from kestrl._shared.spec import read_job
from kestrl._shared.spec.sft import SFT_KIND, read_sft_job
from kestrl.errors import UserInputError
from kestrl_operator.render.job import preparation
from kestrl_operator.render.sft import preparation as sft_preparation

EXAMPLES = Path(__file__).parents[3] / "examples"
NEEDED = re.compile(r"^#   (\S+=s3://BUCKET/\S+)$", re.MULTILINE)
"""A line of a comment with a field and its value on a cluster."""


def uses_devices(path: Path) -> bool:
    text = path.read_text()
    return re.search(r"profile: (nvidia|ascend)|device: (cuda|npu)", text) is not None and "kind: " in text


PATHS = sorted(path for path in EXAMPLES.rglob("*.yaml") if uses_devices(path))


def check(path: Path, overrides: Sequence[str]) -> None:
    """What the operator checks of addresses before it makes any pod."""
    if yaml.safe_load(path.read_text())["kind"] == SFT_KIND:
        check_addresses(sft_preparation(read_sft_job(path, tuple(overrides))))
        return
    job = read_job(path, overrides)
    for role in (Role.LEARNER, Role.ROLLOUT):
        check_addresses(preparation(job, role))


@pytest.mark.parametrize("path", PATHS, ids=[str(path.relative_to(EXAMPLES)) for path in PATHS])
def test_an_example_for_accelerators_names_what_a_cluster_needs(path: Path) -> None:
    needed = NEEDED.findall(path.read_text())
    check(path, needed)
    for field in needed:
        with pytest.raises(UserInputError, match=rf"spec.{field.partition('=')[0]}: .*is a local path"):
            check(path, [other for other in needed if other != field])


def test_there_are_examples_of_both_makes_and_kinds() -> None:
    assert len(PATHS) > 8
