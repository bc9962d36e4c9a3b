"""SQL conditions on the table of episodes, by DuckDB over Arrow tables in memory, without access to anything else."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from kestrl.errors import UserInputError
from kestrl.storage.table.columns import KINDS

CONFIGURATION = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "threads": "2",
    "memory_limit": "512MB",
    "lock_configuration": "true",
}
"""Settings of the database: a condition reads no file, no network and no variable of this program."""


class EpisodeCondition:
    """A condition of `--where`.

    Args:
        text: An expression of DuckDB's SQL over the columns.

    Raises:
        UserInputError: It is not one expression, or DuckDB is not installed.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._duckdb = _duckdb()
        self._connection = self._duckdb.connect(":memory:", config=CONFIGURATION)
        # A person's own SQL, in a database that reaches nothing but the table.
        self._statement = f"SELECT * FROM episodes WHERE (\n{text}\n)"  # noqa: S608
        try:
            statements = self._connection.extract_statements(self._statement)
        except self._duckdb.Error as error:
            raise self._refused(error) from error
        if len(statements) != 1:
            raise UserInputError(f"--where: {text!r} is not one expression")

    def columns(self) -> Collection[str]:
        """Columns that the condition may name."""
        words = set(re.findall(r"\w+", self._text.lower()))
        return [name for name in KINDS if name.lower() in words]

    def matching(self, table: Any) -> Any:
        """The rows of an Arrow table for which the condition holds, in their order.

        Raises:
            UserInputError: The condition names no column of the table, or fails.
        """
        try:
            self._connection.register("episodes", table)
            return self._connection.sql(self._statement).to_arrow_table()
        except self._duckdb.Error as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> UserInputError:
        reason = str(error).partition("\n\nLINE")[0].replace("\n", " ")
        return UserInputError(f"--where: {self._text!r}: {reason}; the columns are in the documentation of episodes")


def _duckdb() -> Any:
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise UserInputError("--where needs DuckDB: pip install 'kestrl[cli]'") from error
    return duckdb
