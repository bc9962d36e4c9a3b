"""Templates of the page. Everything that they print is hostile: it is escaped, and control characters are visible."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kestrl._app.page import addresses
from kestrl._app.page.conversation import cut, text
from kestrl.storage.table.arrow import parquet
from kestrl.terminal import safe

FILES = Path(__file__).parent / "files"


def _visible(printed: Any) -> Any:
    """Text with control and bidirectional characters written out; what templates themselves made passes."""
    return safe(printed) if isinstance(printed, str) and not hasattr(printed, "__html__") else printed


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, text=lambda content: cut(text(content)))
    return environment


def load() -> None:
    """Loads what the first page would wait for: the templates and the reader of stored episodes."""
    environment = _environment()
    for name in environment.list_templates(extensions=["html"]):
        environment.get_template(name)
    parquet()


def render(template: str, **facts: Any) -> str:
    """A page."""
    return _environment().get_template(template).render(addresses=addresses, **facts)
