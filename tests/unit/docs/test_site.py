"""The site of the documentation: every page is in its navigation and says whom it is for. `make docs` builds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
SECTIONS = ["Start", "Concepts", "Guides", "Reference", "Comparison", "Measured"]


def listed(navigation: Any) -> Iterator[str]:
    """The files of a navigation, in its order."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for each in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from listed(each)


def test_every_page_is_once_in_the_navigation() -> None:
    assert [name for section in SITE["nav"] for name in section] == SECTIONS
    files = list(listed(SITE["nav"]))
    assert sorted(files) == [page.name for page in PAGES]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_in_its_first_sentence_whom_it_is_for(path: Path) -> None:
    title, audience = path.read_text().split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"For (those|contributors|administrators)\b.+[.;]", audience, re.DOTALL)


def test_modules_of_the_python_api_exist() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/python-api.md").read_text(), re.MULTILINE)
    assert len(names) > 8
    assert [name for name in names if find_spec(name) is None] == []


def test_the_site_refuses_what_is_broken() -> None:
    assert SITE["strict"] is True
    assert set(SITE["validation"].values()) == {"warn"}
