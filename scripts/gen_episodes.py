"""Generates the table of columns in docs/episodes.md from `kestrl.storage.table.columns`.

With `--check` it reports a stale page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kestrl.storage.table.columns import COLUMNS, kind_words

PAGE = Path(__file__).parents[1] / "docs" / "episodes.md"
START = "<!-- columns: made by `make gen` from kestrl.storage.table.columns -->"
END = "<!-- end of columns -->"


def with_columns(page: str) -> str:
    """The page with the table of the present columns."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    rows = [f"| `{column.name}` | `{kind_words(column.kind)}` | {column.meaning} |" for column in COLUMNS]
    return "\n".join([before + START, "| column | type | meaning |", "|---|---|---|", *rows, END + after])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text(encoding="utf-8")
    made = with_columns(page)
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if made != page:
        print(f"{PAGE} is stale: make gen")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
