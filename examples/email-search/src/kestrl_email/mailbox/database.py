"""The mail database: writing with copies folded, and checks. One SQLite file.

Mails have a sender, recipients and a text; the full-text index is an external-content FTS5 table that triggers keep
equal to `emails` under insert, update and delete. A mail is in the inbox of its sender, of every recipient, and of the
source's owner; the index has a token for each of these inboxes, so that a search of one inbox never reads the
others.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from kestrl.errors import UserInputError, place_error
from kestrl_email.mailbox import schema
from kestrl_email.mailbox.message import ParsedMail
from kestrl_email.mailbox.schema import EDITION

APPLICATION_ID = 0x4B654D61
HEAD_BYTES = 64 * 1024
"""First bytes by which a source file is recognised; it may have grown since."""
CACHE_KIB = 96 * 1024
"""Page cache of a build."""
MAPPED_BYTES = 2 * 1024**3
"""Bytes of the file that a reader maps."""
REMEMBERED = 200_000
"""Addresses whose ids a build remembers."""


class Outcome(StrEnum):
    """What became of a record."""

    MAIL = "mail"
    DUPLICATE = "duplicate"
    """A copy of a mail that is there; its recipients are added to it."""
    FILTERED = "filtered"
    MALFORMED = "malformed"
    DELETED = "deleted"
    """Its mail was deleted from the database; a later build does not bring it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Settings that decide which mails are kept; the same for every build of a database."""

    max_body: int | None = None
    """Maximum characters of a body (ART-E: 5000)."""
    max_recipients: int | None = None
    """Maximum recipients (ART-E: 30)."""
    fold_days: bool = False
    """Whether equal texts of different days are one mail, as in ART-E."""

    def refuses(self, mail: ParsedMail) -> str:
        """Why a mail is left out; empty if it is kept."""
        if self.max_body is not None and len(mail.body) > self.max_body:
            return f"body of {len(mail.body)} characters"
        if self.max_recipients is not None and len(mail.recipients) > self.max_recipients:
            return f"{len(mail.recipients)} recipients"
        return ""


def inbox_token(address_id: int) -> str:
    """Token of an inbox in the column `owners` of the full-text index."""
    return f"inbox{address_id}"


def open_database(path: Path) -> sqlite3.Connection:
    """A mail database, opened read-only and immutable: no lock is needed.

    Raises:
        UserInputError: It does not exist, or is not a mail database of this edition.
    """
    if not path.is_file():
        raise UserInputError(f"{path} does not exist; make it with `kestrl email build-db --source ... --out {path}`")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        _check_edition(connection, path)
    except BaseException:
        connection.close()
        raise
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")  # one page cache for all instances of the tools
    return connection


def _check_edition(connection: sqlite3.Connection, path: Path) -> None:
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        edition = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise UserInputError(f"{path} is not a mail database: {error}") from error
    if application != APPLICATION_ID:
        raise UserInputError(f"{path} is not a mail database of `kestrl email build-db`")
    if edition != EDITION:
        raise UserInputError(f"{path} has edition {edition} of the schema, not {EDITION}; build it again")


def rows_digest(path: Path) -> str:
    """Digest of all mails, recipients and inboxes: equal for equal content."""
    hashed = hashlib.sha256()
    with closing(open_database(path)) as connection:
        for query in (
            "SELECT message_id, date, from_address, sender, subject, file_name, body FROM emails ORDER BY id",
            "SELECT * FROM recipients",
            "SELECT * FROM inboxes",
            "SELECT source_id, place, outcome, email_id, message_id, note FROM records",
        ):
            for row in connection.execute(query):
                hashed.update(json.dumps(tuple(row)).encode())
    return hashed.hexdigest()


def check_integrity(connection: sqlite3.Connection) -> None:
    """Checks the file, and that the full-text index is equal to the mails.

    Raises:
        UserInputError: They differ.
    """
    try:
        connection.execute("INSERT INTO emails_fts (emails_fts, rank) VALUES ('integrity-check', 1)")
        verdict = connection.execute("PRAGMA quick_check").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise UserInputError(
            f"the full-text index differs from the mails: {error}; build the database again"
        ) from error
    if verdict != "ok":
        raise UserInputError(f"the database is damaged: {verdict}")


class MailWriter:
    """Writes mails to a database, each record in full or not at all.

    `commit` ends a transaction; what came after the last one is gone when the process is killed, and read again.

    Raises:
        UserInputError: The file is something else, was built with other filters, or is being written by another
            process.
    """

    def __init__(self, path: Path, filters: Filters) -> None:
        self._path, self._filters = path, filters
        self._ids: dict[str, int] = {}
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.OperationalError as error:
            raise place_error(error, str(path)) or UserInputError(f"--out: {path}: {error}") from error
        try:
            self._prepare()
        except sqlite3.OperationalError as error:
            self._connection.close()
            if "locked" in str(error):
                raise UserInputError(f"--out: {path} is being written by another process") from error
            raise place_error(error, str(path)) or UserInputError(f"--out: {path}: {error}") from error
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise UserInputError(f"--out: {path} is not a database: {error}") from error
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables:
            _check_edition(self._connection, self._path)
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("BEGIN IMMEDIATE")
        if not tables:
            for statement in schema.statements():
                execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {EDITION}")
            execute("INSERT INTO settings VALUES ('filters', ?)", (json.dumps(asdict(self._filters)),))
        self._check_filters()
        execute("COMMIT")
        execute("BEGIN")

    def _check_filters(self) -> None:
        stored_filters = json.loads(
            self._connection.execute("SELECT value FROM settings WHERE name = 'filters'").fetchone()[0]
        )
        if stored_filters != asdict(self._filters):
            differing = [
                f"--{field.name.replace('_', '-')} was {stored_filters.get(field.name)}"
                for field in fields(Filters)
                if stored_filters.get(field.name) != getattr(self._filters, field.name)
            ]
            raise UserInputError(
                f"--out: {self._path} was built with other filters ({', '.join(differing)}); "
                f"use the same, or a new file"
            )

    def source(self, path: Path, kind: str, size: int | None, head: bytes) -> int:
        """Id of a source, which is recognised by its path and first bytes.

        Raises:
            UserInputError: The file of an earlier build has been replaced: its places have another meaning now.
        """
        name = str(path.resolve())
        row = self._connection.execute("SELECT id, kind, size, head FROM sources WHERE path = ?", (name,)).fetchone()
        if row is None:
            cursor = self._connection.execute(
                "INSERT INTO sources (path, kind, size, head) VALUES (?, ?, ?, ?)", (name, kind, size, _digest(head))
            )
            return int(cursor.lastrowid or 0)
        before = int(row[2] or 0)
        if row[1] != kind or row[3] != _digest(head[:before]) or (size or 0) < before:
            raise UserInputError(
                f"--source: {path} is another file than when {self._path} was built; build a new database"
            )
        if size != row[2]:
            changed = (size, _digest(head), row[0])
            self._connection.execute("UPDATE sources SET size = ?, head = ? WHERE id = ?", changed)
        return int(row[0])

    def knows(self, source: int, place: str) -> bool:
        """Whether a record has been read before."""
        query = "SELECT 1 FROM records WHERE source_id = ? AND place = ?"
        return self._connection.execute(query, (source, place)).fetchone() is not None

    def refuse(self, source: int, place: str, note: str) -> Outcome:
        """Records a malformed record."""
        self._record(source, place, Outcome.MALFORMED, None, "", note)
        return Outcome.MALFORMED

    def add(self, source: int, place: str, mail: ParsedMail, *, owner: str = "") -> Outcome:
        """Adds a mail, or the recipients of a copy to the mail that is there."""
        if note := self._filters.refuses(mail):
            self._record(source, place, Outcome.FILTERED, None, mail.message_id, note)
            return Outcome.FILTERED
        digest = mail.digest(with_day=not self._filters.fold_days)
        existing = self._existing(mail, digest)
        if existing is None:
            email_id, message_id = self._insert(place, mail, digest, owner)
            self._record(source, place, Outcome.MAIL, email_id, message_id, "")
            return Outcome.MAIL
        self._merge(existing, mail, owner)
        self._record(source, place, Outcome.DUPLICATE, existing, mail.message_id, "")
        return Outcome.DUPLICATE

    def _existing(self, mail: ParsedMail, digest: bytes) -> int | None:
        """Id of the mail that this one is a copy of: the same digest, or the same Message-ID, sender and date."""
        row = self._connection.execute("SELECT id FROM emails WHERE digest = ?", (digest,)).fetchone()
        if row is None and mail.message_id:
            row = self._connection.execute(
                "SELECT id FROM emails WHERE message_id = ? AND from_address = ? AND date = ?",
                (mail.message_id, mail.from_address, mail.date),
            ).fetchone()
        return None if row is None else int(row[0])

    def _insert(self, place: str, mail: ParsedMail, digest: bytes, owner: str) -> tuple[int, str]:
        message_id = mail.message_id
        query = "SELECT 1 FROM emails WHERE message_id = ?"
        if not message_id or self._connection.execute(query, (message_id,)).fetchone():
            message_id = f"<{digest.hex()}@generated.invalid>"
        owners = self._owners(mail, owner)
        sender = f"{mail.from_name} {mail.from_address}".strip()
        file_name = f"{mail.folder} {place}".strip()
        row = self._connection.execute(
            "INSERT INTO emails (message_id, date, from_address, digest, owners, sender, subject, file_name, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message_id,
                mail.date,
                mail.from_address,
                digest,
                " ".join(map(inbox_token, owners)),
                sender,
                mail.subject,
                file_name,
                mail.body,
            ),
        )
        email_id = int(row.lastrowid or 0)
        self._link(email_id, mail, owners)
        return email_id, message_id

    def _owners(self, mail: ParsedMail, owner: str) -> list[int]:
        addresses = [owner, mail.from_address, *(address for address, _ in mail.recipients)]
        return [self._address(address) for address in dict.fromkeys(addresses) if address]

    def _link(self, email_id: int, mail: ParsedMail, owners: list[int]) -> None:
        self._connection.executemany(
            "INSERT OR IGNORE INTO recipients VALUES (?, ?, ?)",
            [(email_id, address, kind) for address, kind in mail.recipients],
        )
        self._connection.executemany(
            "INSERT OR IGNORE INTO inboxes SELECT ?, date, id FROM emails WHERE id = ?",
            [(owner, email_id) for owner in owners],
        )

    def _merge(self, email_id: int, mail: ParsedMail, owner: str) -> None:
        """Adds the recipients and inboxes of a copy; unchanged rows are not written."""
        owners = self._owners(mail, owner)
        stored_owners = str(
            self._connection.execute("SELECT owners FROM emails WHERE id = ?", (email_id,)).fetchone()[0]
        )
        merged = " ".join(dict.fromkeys([*stored_owners.split(), *map(inbox_token, owners)]))
        self._link(email_id, mail, owners)
        if merged != stored_owners:
            self._connection.execute("UPDATE emails SET owners = ? WHERE id = ?", (merged, email_id))

    def _address(self, address: str) -> int:
        address_id = self._ids.get(address)
        if address_id is not None:
            return address_id
        row: Any = self._connection.execute("SELECT id FROM addresses WHERE address = ?", (address,)).fetchone()
        if row is None:
            cursor = self._connection.execute("INSERT INTO addresses (address) VALUES (?)", (address,))
            row = (cursor.lastrowid or 0,)
        if len(self._ids) >= REMEMBERED:
            self._ids.clear()
        self._ids[address] = int(row[0])
        return int(row[0])

    def _record(
        self, source: int, place: str, outcome: Outcome, email_id: int | None, message_id: str, note: str
    ) -> None:
        self._connection.execute(
            "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?)",
            (source, place, outcome, email_id, message_id, note),
        )

    def counts(self) -> Mapping[str, int]:
        """Records by outcome."""
        return dict(self._connection.execute("SELECT outcome, count(*) FROM records GROUP BY outcome"))

    def malformed(self, limit: int) -> list[tuple[str, str, str]]:
        """Source, place and reason of malformed records."""
        query = (
            "SELECT path, place, note FROM records JOIN sources ON sources.id = source_id WHERE outcome = 'malformed' "
            "ORDER BY source_id, place LIMIT ?"
        )
        return self._connection.execute(query, (limit,)).fetchall()

    def commit(self) -> None:
        """Makes what was written durable."""
        self._connection.execute("COMMIT")
        self._connection.execute("BEGIN")

    def optimise(self) -> None:
        """Merges the full-text index and collects statistics, if anything was written since."""
        self._connection.execute("COMMIT")
        self._connection.execute("INSERT INTO emails_fts (emails_fts) VALUES ('optimize')")
        self._connection.execute("ANALYZE")
        self._connection.execute("BEGIN")

    def close(self, *, keep: bool) -> None:
        """Ends the last transaction; afterwards the database is one file without a journal.

        Args:
            keep: Whether the last transaction is kept.
        """
        try:
            self._connection.execute("COMMIT" if keep else "ROLLBACK")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._connection.close()


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=16).digest()


def inbox_id(connection: sqlite3.Connection, address: str) -> int | None:
    """Id of an inbox; None if no mail is in it."""
    row = connection.execute("SELECT id FROM addresses WHERE address = ?", (address.lower(),)).fetchone()
    return None if row is None else int(row[0])


def inboxes(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    """Addresses with the number of mails in their inbox, largest first."""
    query = (
        "SELECT address, count(*) AS mails FROM inboxes JOIN addresses ON "
        "addresses.id = address_id GROUP BY address_id ORDER BY mails DESC, address"
    )
    return [(str(row[0]), int(row[1])) for row in connection.execute(query)]


def canonical_id(connection: sqlite3.Connection, inbox: int, message_id: str) -> tuple[int, str] | None:
    """Row and Message-ID of the mail that an id names in an inbox: its own, or that of a folded copy."""
    row: Any = connection.execute(
        "SELECT emails.id, emails.message_id FROM emails WHERE (emails.message_id "
        "= :id OR emails.id IN (SELECT email_id "
        "FROM records WHERE outcome = 'duplicate' AND message_id = :id)) AND EXISTS (SELECT 1 FROM inboxes WHERE "
        "email_id = emails.id AND address_id = :inbox) ORDER BY emails.message_id = :id DESC LIMIT 1",
        {"id": message_id, "inbox": inbox},
    ).fetchone()
    return None if row is None else (int(row[0]), str(row[1]))
