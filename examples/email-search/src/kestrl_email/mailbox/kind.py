"""Formats of sources of mail."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Formats of sources."""

    MAILDIR = "maildir"
    TAR = "tar"
    MBOX = "mbox"
    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"
