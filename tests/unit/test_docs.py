"""What the documents say exists, exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")


def test_every_test_that_the_documents_name_exists() -> None:
    named = {match for path in (ROOT / "docs").glob("*.md") for match in NAMED.findall(path.read_text())}
    assert len(named) > 20
    texts: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        texts[path.name] = texts.get(path.name, "") + path.read_text()
    missing = [(file, name) for file, name in named if not re.search(rf"\b{name}\b", texts.get(file, ""))]
    assert missing == []


def test_every_file_that_the_architecture_names_exists() -> None:
    words = re.findall(r"`((?:\w+/)*\w+\.py)(?::[^`]*)?`", (ROOT / "docs" / "architecture.md").read_text())
    known = [path.as_posix() for folder in ("src", "services", "operator") for path in (ROOT / folder).rglob("*.py")]
    assert [word for word in words if not any(path.endswith("/" + word) for path in known)] == []
