"""pyarrow, loaded on first use, and the table's schema in its types."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from kestrl.errors import UserInputError
from kestrl.storage.table.columns import COLUMNS, SCHEMA_VERSION, VERSION_KEY, Kind


def arrow() -> Any:
    """The module `pyarrow`.

    Raises:
        UserInputError: It is not installed.
    """
    return _module("pyarrow")


def parquet() -> Any:
    """The module `pyarrow.parquet`.

    Raises:
        UserInputError: It is not installed.
    """
    return _module("pyarrow.parquet")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserInputError("stored episodes need pyarrow: pip install 'kestrl[parquet]'") from error


def arrow_type(kind: Kind) -> Any:
    """A column's type."""
    pa = arrow()
    if isinstance(kind, str):
        return pa.type_for_alias(kind)
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    return pa.struct([pa.field(name, arrow_type(member)) for name, member in kind.items()])


@cache
def schema() -> Any:
    """The schema of every file."""
    pa = arrow()
    fields = [pa.field(column.name, arrow_type(column.kind)) for column in COLUMNS]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})
