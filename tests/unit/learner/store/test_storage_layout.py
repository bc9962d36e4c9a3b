"""What docs/storage.md says that a run stores is what a run stores: every file and every field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.unit.learner.fakes import running

from kestrl.storage import AdapterManifest, open_store

PAGE = (Path(__file__).parents[4] / "docs" / "storage.md").read_text()


def section(title: str) -> str:
    """A section of the page."""
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def fields(text: str) -> set[str]:
    """The names in the first column of its table."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


async def test_a_run_stores_what_the_page_says(staged: Any) -> None:
    async with staged(max_steps=4, eval_every=2) as stage, running(stage.settings):
        pass
    documented = re.findall(r"^\| `([\w./=-]+)` \|", PAGE.partition("## ")[0], re.MULTILINE)
    patterns = {
        path: re.escape(path)
        .replace("NNNNNN", r"\d{6}")
        .replace("DIGEST", "[0-9a-f]{12}")
        .replace(r"NUMBER\-OWNER", r"\d{12}-\d{8}")
        for path in documented
    }
    stored = open_store(stage.settings.storage).list("")
    for path in stored:
        assert any(re.match(pattern, path) for pattern in patterns.values()), path
    of_others = {"tools.json", "models/NNNNNN-DIGEST/", "episodes/labels/DIGEST.parquet"}
    # of a job with tool servers, of fine-tuning, and of people
    for path in patterns.keys() - of_others:
        assert any(re.match(patterns[path], name) for name in stored), path

    summary = stage.summary
    assert fields(section("summary.json")) == summary.keys()
    step = stage.read("metrics/000001.json")
    means = {"reward", "num_turns", "duration"}
    assert fields(section("A step's metrics")) | means == step.keys() - {"answer_correct"}
    documented = set(re.findall(r"`(\w+)`", section("Adapters").partition("It holds")[2].partition("To have it")[0]))
    assert documented == set(AdapterManifest.model_fields)
