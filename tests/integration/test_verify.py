"""`kestrl verify` on real engines: SFT, a run, the verdict. The twin, for the tiny model, of a threshold
that needs weights and an accelerator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .runs import ROOT, belonging_to, kestrl

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
TWINS = ["convergence/letters-threshold.yaml"]


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_reaches_its_threshold(twin: str, tmp_path: Path) -> None:
    arguments = ("verify", ROOT / "examples" / twin, "--runs", tmp_path)
    printed = kestrl(*arguments, timeout=450)
    assert printed.split()[-2] == "passed", printed
    (place,) = (tmp_path / "verify").iterdir()
    (seed,) = json.loads(place.read_text())["seeds"]
    assert seed["plateau"] > seed["before"]
    again = kestrl(*arguments)
    assert f"{seed['run']} has finished: judging it" in again
    assert json.loads(place.read_text())["seeds"] == [seed]
    assert belonging_to(tmp_path) == []
