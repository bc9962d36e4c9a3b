"""A hook of MkDocs (`make docs`): links that leave docs/ become the names of their files in the repository.

The site has the pages of docs/ alone; in the repository the same links lead to examples, tests and other files.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page without links that leave its site."""
    return OUTSIDE.sub(lambda link: _named(link[1], link[2]), markdown)


def _named(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") == path or path.endswith(text.strip("`")) else f"{text} (`{path}`)"
