"""The three tools of e-mail search, as plain classes: one instance per episode, scoped to the scenario's inbox.

Contracts as in ART-E, without the defects of the published ones: reading is scoped to the inbox, recipients are found
by the row's own key, a limit cannot be negative, a string is not a list of keywords, dates are checked, control
characters and full-text syntax in a keyword are data, and so are strings that UTF-8 cannot hold.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kestrl.tools import ToolError, ToolResult

DONT_KNOW = "I don't know"


def _open(database: str) -> sqlite3.Connection:
    """Opens the database read-only. `as_uri` quotes characters that are not allowed in URIs; the file is immutable, so
    no lock is needed.
    """
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.row_factory = sqlite3.Row
    return connection


def _check_row(*, database: str, inbox: str) -> None:
    """Refuses a row whose database is gone; an inbox without mail is legal."""
    if not Path(database).is_file():
        raise ValueError(f"the database {database} does not exist; generate the rows again (inbox {inbox})")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def day(value: str | None, name: str) -> str | None:
    """An ISO date; None stays None."""
    if value is None:
        return None
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ToolError(f"{name} must be a date such as 2025-03-31") from None


def storable(text: str) -> str:
    """Text for SQLite: replaces lone surrogates, which JSON allows and UTF-8 does not."""
    return text.encode("utf-8", "replace").decode()


def _match(keywords: Sequence[str]) -> str:
    """Full-text query for all keywords. Checked here too, for callers without a schema."""
    if isinstance(keywords, str):
        raise ToolError("keywords must be a list of words")
    if not keywords:
        raise ToolError("give at least one keyword")
    return " AND ".join(phrase(keyword) for keyword in keywords)


def phrase(keyword: str) -> str:
    """A keyword as an FTS5 string: nothing in it is syntax."""
    clean = "".join(character for character in keyword if character.isprintable()).strip()
    if not any(character.isalnum() for character in clean):
        raise ToolError("a keyword must hold letters or digits")
    return '"' + clean.replace('"', '""') + '"'


class SearchEmails:
    """Search the mailbox."""

    check_row = staticmethod(_check_row)

    def __init__(self, *, database: str, inbox: str) -> None:
        self._connection = _open(database)
        self._inbox = inbox

    def __call__(
        self,
        keywords: Annotated[
            list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=10)
        ],
        from_addr: str | None = None,
        to_addr: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        max_results: Annotated[int, Field(ge=1, le=10)] = 10,
    ) -> ToolResult:
        """Find mails that contain all keywords, newest first.

        Args:
            keywords: Words that must all occur in the sender, subject or body.
            from_addr: Only mails from this address.
            to_addr: Only mails to this address.
            sent_after: Only mails of this day (YYYY-MM-DD) or later.
            sent_before: Only mails before this day (YYYY-MM-DD).
            max_results: At most so many.
        """
        if not 1 <= max_results <= 10:
            raise ToolError("max_results must be between 1 and 10")
        conditions = ["emails_fts MATCH ?", "emails.inbox = ?"]
        values: list[Any] = [_match(keywords), self._inbox]
        if from_addr is not None:
            conditions.append("emails.from_address = ? COLLATE NOCASE")
            values.append(storable(from_addr))
        if to_addr is not None:
            conditions.append(
                "EXISTS (SELECT 1 FROM recipients WHERE email_id = emails.id AND address = ? COLLATE NOCASE)"
            )
            values.append(storable(to_addr))
        for bound, operator, name in ((sent_after, ">=", "sent_after"), (sent_before, "<", "sent_before")):
            checked = day(bound, name)
            if checked is not None:
                conditions.append(f"emails.date {operator} ?")
                values.append(checked)
        rows = self._connection.execute(
            "SELECT emails.message_id, emails.sender, emails.subject FROM emails_fts "  # noqa: S608 - conditions are our own words
            f"JOIN emails ON emails.id = emails_fts.rowid WHERE {' AND '.join(conditions)} "
            "ORDER BY emails.date DESC, emails.id LIMIT ?",
            [*values, max_results],
        ).fetchall()
        found = [{"message_id": row["message_id"], "snippet": f"{row['sender']}: {row['subject']}"} for row in rows]
        return ToolResult(text=_text(found), data={"found": [row["message_id"] for row in rows]})

    def close(self) -> None:
        self._connection.close()


class ReadEmail:
    """Read one mail."""

    check_row = staticmethod(_check_row)

    def __init__(self, *, database: str, inbox: str) -> None:
        self._connection = _open(database)
        self._inbox = inbox

    def __call__(self, message_id: Annotated[str, Field(min_length=1, max_length=200)]) -> ToolResult:
        """Read a mail whole.

        Args:
            message_id: As search_emails gave it.
        """
        row = self._connection.execute(
            "SELECT * FROM emails WHERE inbox = ? AND message_id = ?", (self._inbox, storable(message_id))
        ).fetchone()
        if row is None:
            raise ToolError(f"no mail {storable(message_id)} in this mailbox; use an id that search_emails gave")
        recipients = self._connection.execute(
            "SELECT address, kind FROM recipients WHERE email_id = ? ORDER BY rowid", (row["id"],)
        ).fetchall()
        addresses = {
            f"{kind}_addresses": [item["address"] for item in recipients if item["kind"] == kind]
            for kind in ("to", "cc", "bcc")
        }
        mail = {
            "message_id": row["message_id"],
            "date": row["date"],
            "from_address": row["from_address"],
            **{name: listed for name, listed in addresses.items() if listed},
            "subject": row["subject"],
            "body": row["body"],
        }
        return ToolResult(text=_text(mail), data={"read": row["message_id"]})

    def close(self) -> None:
        self._connection.close()


class ReturnFinalAnswer:
    """Give the answer; ends the episode."""

    def __init__(self, *, database: str = "", inbox: str = "") -> None:
        """Accepts the arguments of the other tools without using them."""

    def __call__(
        self,
        answer: Annotated[str, Field(max_length=1000)],
        sources: Annotated[list[str], Field(max_length=10)],
    ) -> ToolResult:
        """Answer the question.

        Args:
            answer: The answer, or exactly "I don't know".
            sources: Ids of the mails that hold it; empty if unknown.
        """
        given = {"answer": storable(answer), "sources": [storable(source) for source in sources]}
        return ToolResult(text=_text({"received": True}), final=True, data=given)
