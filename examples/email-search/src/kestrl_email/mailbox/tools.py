"""The three tools on real mail: one instance per episode, scoped to the scenario's inbox.

Contracts of ART-E (`search_emails`, `read_email`, `return_final_answer`) with what real mail needs beside them:
snippets that show the match, a total and pages, oldest first, listing without keywords, long bodies in parts, and
copies under one id. The tools of the synthetic demo are in `kestrl_email.tools`; its tiny model knows only those.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kestrl.errors import UserInputError
from kestrl.tools import ToolError, ToolResult
from kestrl_email.mailbox.database import canonical_id, inbox_id, inbox_token, open_database
from kestrl_email.tools import day, phrase, storable

PART = 4000
"""Characters of a body that are read at a time."""
MAX_PAGE = 1000
SNIPPET_TOKENS = 15
BEGINNING = 100
"""Characters of a body that stand for a snippet when nothing was searched for."""
BODY = 3
"""Position of the column `body` in the full-text index."""


class _Inbox:
    """A connection and the inbox that every query is scoped to."""

    def __init__(self, database: str, inbox: str) -> None:
        self.connection = open_database(Path(database))
        found = inbox_id(self.connection, inbox)
        if found is None:
            self.connection.close()
            raise UserInputError(
                f"{database} has no mail in the inbox of {inbox}; see `kestrl email inboxes {database}`"
            )
        self.id = found


def _check_row(*, database: str, inbox: str) -> None:
    """Refuses a row whose database or inbox is gone."""
    _Inbox(database, inbox).connection.close()


def _copies(connection: sqlite3.Connection, email_ids: Sequence[int]) -> dict[str, Any]:
    """For rewards: the ids of mails' folded copies, each with the id that the tools use. A row may name any of them."""
    query = (
        "SELECT records.message_id, emails.message_id FROM records JOIN emails ON emails.id = email_id "
        "WHERE email_id = ? AND outcome = 'duplicate' AND records.message_id <> emails.message_id"
    )
    copies = {str(row[0]): str(row[1]) for each in email_ids for row in connection.execute(query, (each,))}
    return {"copies": copies} if copies else {}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _matching(inbox: int, keywords: Sequence[str]) -> str:
    """Full-text query for mails of an inbox with all keywords in sender, subject or body."""
    words = " AND ".join(f"{{sender subject body}} : {phrase(keyword)}" for keyword in keywords)
    return f'owners : "{inbox_token(inbox)}" AND {words}'


def _conditions(
    from_addr: str | None, to_addr: str | None, sent_after: str | None, sent_before: str | None
) -> dict[str, str]:
    """SQL conditions of the filters that are set, each with its value."""
    conditions: dict[str, str] = {}
    if from_addr is not None:
        conditions["emails.from_address = ?"] = storable(from_addr).lower()
    if to_addr is not None:
        recipient = "EXISTS (SELECT 1 FROM recipients WHERE email_id = listed.email_id AND address = ?)"
        conditions[recipient] = storable(to_addr).lower()
    for bound, operator, name in ((sent_after, ">=", "sent_after"), (sent_before, "<", "sent_before")):
        checked = day(bound, name)
        if checked is not None:
            conditions[f"listed.date <> '' AND listed.date {operator} ?"] = checked
    return conditions


class SearchEmails:
    """Search the mailbox."""

    check_row = staticmethod(_check_row)

    def __init__(self, *, database: str, inbox: str) -> None:
        self._inbox = _Inbox(database, inbox)
        self._connection = self._inbox.connection

    def __call__(
        self,
        keywords: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=10)] = [],  # noqa: B006 - never changed; the schema shows it
        from_addr: Annotated[str, Field(max_length=200)] | None = None,
        to_addr: Annotated[str, Field(max_length=200)] | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        oldest_first: bool = False,
        max_results: Annotated[int, Field(ge=1, le=10)] = 10,
        page: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 1,
    ) -> ToolResult:
        """Find mails that contain all keywords, newest first. The total says how many there are.

        Args:
            keywords: Words that must all occur in the sender, subject or body; without any, mails are listed.
            from_addr: Only mails from this address.
            to_addr: Only mails to this address.
            sent_after: Only mails of this day (YYYY-MM-DD) or later.
            sent_before: Only mails before this day (YYYY-MM-DD).
            oldest_first: List the oldest mails first.
            max_results: Results on a page.
            page: Page of the results, from 1.
        """
        if isinstance(keywords, str):
            raise ToolError("keywords must be a list of words")
        if not 1 <= max_results <= 10:
            raise ToolError("max_results must be between 1 and 10")
        if not 1 <= page <= MAX_PAGE:
            raise ToolError(f"page must be between 1 and {MAX_PAGE}")
        match = _matching(self._inbox.id, keywords) if keywords else None
        tables, conditions, values = "inboxes AS listed", ["listed.address_id = ?"], list[Any]([self._inbox.id])
        if match is not None:  # dates come from the index inboxes_email, so that no text is read
            tables = "emails_fts CROSS JOIN inboxes AS listed ON listed.email_id = emails_fts.rowid"
            conditions.append("emails_fts MATCH ?")
            values.append(match)
        if from_addr is not None:
            # Every mail is in its sender's inbox, too: texts are read of mails only that are in both.
            tables += (
                " CROSS JOIN inboxes AS sent ON sent.address_id = (SELECT id FROM addresses WHERE address = ?) "
                "AND sent.date = listed.date AND sent.email_id = listed.email_id "
                "CROSS JOIN emails ON emails.id = sent.email_id"
            )
            values.insert(0, storable(from_addr).lower())
        filters = _conditions(from_addr, to_addr, sent_after, sent_before)
        order = (
            "listed.date = '', listed.date, listed.email_id"
            if oldest_first
            else "listed.date DESC, listed.email_id DESC"
        )
        found = self._connection.execute(
            f"SELECT listed.email_id FROM {tables} WHERE {' AND '.join([*conditions, *filters])} "  # noqa: S608 - our own words
            f"ORDER BY {order}",
            [*values, *filters.values()],
        ).fetchall()
        start = (page - 1) * max_results
        shown = [row["email_id"] for row in found[start : start + max_results]]
        results = [self._shown(email_id, match) for email_id in shown]
        answer = {"total": len(found), "page": page, "results": results}
        ids = [item["message_id"] for item in results]
        return ToolResult(text=_text(answer), data={"found": ids} | _copies(self._connection, shown))

    def _shown(self, email_id: int, match: str | None) -> dict[str, Any]:
        row = self._connection.execute(
            "SELECT message_id, date, from_address, subject, substr(body, 1, ?) AS body FROM emails WHERE id = ?",
            (BEGINNING, email_id),
        ).fetchone()
        snippet = str(row["body"])
        if match is not None:
            query = (
                f"SELECT snippet(emails_fts, {BODY}, '<b>', '</b>', ' ... ', {SNIPPET_TOKENS}) FROM emails_fts "  # noqa: S608 - constants
                "WHERE emails_fts MATCH ? AND rowid = ?"
            )
            snippet = str(self._connection.execute(query, (match, email_id)).fetchone()[0])
        return {
            "message_id": row["message_id"],
            "date": row["date"][:16],
            "from": row["from_address"],
            "subject": row["subject"],
            "snippet": " ".join(snippet.split()),
        }

    def close(self) -> None:
        self._connection.close()


class ReadEmail:
    """Read one mail."""

    check_row = staticmethod(_check_row)

    def __init__(self, *, database: str, inbox: str) -> None:
        self._inbox = _Inbox(database, inbox)
        self._connection = self._inbox.connection

    def __call__(
        self,
        message_id: Annotated[str, Field(min_length=1, max_length=1000)],
        part: Annotated[int, Field(ge=1, le=100_000)] = 1,
    ) -> ToolResult:
        """Read a mail; long ones come in parts.

        Args:
            message_id: As search_emails gave it.
            part: Part of a long mail, from 1.
        """
        named = canonical_id(self._connection, self._inbox.id, storable(message_id))
        if named is None:
            raise ToolError(f"no mail {storable(message_id)} in this mailbox; use an id that search_emails gave")
        row = self._connection.execute("SELECT * FROM emails WHERE id = ?", (named[0],)).fetchone()
        pieces = parts(row["body"])
        if not 1 <= part <= len(pieces):
            raise ToolError(f"this mail has {len(pieces)} part{'s' * (len(pieces) > 1)}; there is no part {part}")
        mail = {
            "message_id": row["message_id"],
            "date": row["date"],
            "from": row["sender"],
            **self._recipients(named[0]),
            "subject": row["subject"],
            "body": pieces[part - 1],
        }
        if len(pieces) > 1:
            mail |= {"part": part, "parts": len(pieces)}
        data = {"read": row["message_id"], "part": part, "parts": len(pieces)}
        return ToolResult(text=_text(mail), data=data | _copies(self._connection, [named[0]]))

    def _recipients(self, email_id: int) -> dict[str, list[str]]:
        listed: dict[str, list[str]] = {"to": [], "cc": [], "bcc": []}
        query = "SELECT address, kind FROM recipients WHERE email_id = ? ORDER BY address"
        for row in self._connection.execute(query, (email_id,)):
            listed[row["kind"]].append(row["address"])
        return {kind: addresses for kind, addresses in listed.items() if addresses}

    def close(self) -> None:
        self._connection.close()


def parts(body: str) -> list[str]:
    """A body in parts of at most `PART` characters, cut after a line where there is one in the last quarter."""
    pieces: list[str] = []
    start = 0
    while len(body) - start > PART:
        cut = body.rfind("\n", start + PART * 3 // 4, start + PART) + 1 or start + PART
        pieces.append(body[start:cut])
        start = cut
    return [*pieces, body[start:]]


class ReturnFinalAnswer:
    """Give the answer; ends the episode."""

    check_row = staticmethod(_check_row)

    def __init__(self, *, database: str, inbox: str) -> None:
        self._inbox = _Inbox(database, inbox)

    def __call__(
        self,
        answer: Annotated[str, Field(max_length=2000)],
        sources: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=10)],
    ) -> ToolResult:
        """Answer the question.

        Args:
            answer: The answer, or exactly "I don't know".
            sources: Ids of the mails that hold it; empty if unknown.
        """
        connection, cited = self._inbox.connection, [storable(source) for source in sources]
        known = {source: canonical_id(connection, self._inbox.id, source) for source in cited}
        names = [source if (found := known[source]) is None else found[1] for source in cited]
        copies = _copies(connection, [found[0] for found in known.values() if found is not None])
        data = {"answer": storable(answer), "sources": names} | copies
        return ToolResult(text=_text({"received": True}), final=True, data=data)

    def close(self) -> None:
        self._inbox.connection.close()
