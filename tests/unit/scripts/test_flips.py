"""`make flips`, on a package of its own with one comparison that its test notices and one that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "flips.py"
SOURCE = """
def is_adult(age: int) -> bool:
    return age >= 18


def is_known(name: str, names: list[str]) -> bool:
    return (name
            in names) or ((name) == "ä") or "a" < name < "c"


UNTESTED = "ä" == "b"
"""
TEST = """
from small.ages import is_adult


def test_an_adult() -> None:
    assert is_adult(18) and not is_adult(17)
"""


@pytest.mark.timeout(240)  # pytest starts three times
def test_flips_are_counted_and_the_source_stays_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "src" / "small" / "ages.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    (tmp_path / "test_ages.py").write_text(TEST)
    command = [sys.executable, SCRIPT, "src/small", "--tests", "test_ages.py", "--count", "9"]
    # Of pytest's plugins the one whose option the script gives: the others take most of the time of such a small test.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    *lines, total = ended.stdout.splitlines()
    (survivor,) = filter(None, lines)
    assert total == "1 of 2 flips noticed (2 places, seed 1)"
    assert survivor.partition("  survived  ")[2] == 'src/small/ages.py:11: UNTESTED = "ä" == "b"  ->  !='
    assert source.read_text() == SOURCE
