"""Schema of the mail database."""

from __future__ import annotations

import sqlite3

EDITION = 1
"""Edition of the schema (`user_version`). Increase with every change of it."""

SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sources (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    size INTEGER,
    head BLOB
);
CREATE TABLE addresses (id INTEGER PRIMARY KEY, address TEXT NOT NULL UNIQUE);
CREATE TABLE emails (
    id INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL UNIQUE,
    date TEXT NOT NULL,
    from_address TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    owners TEXT NOT NULL,
    sender TEXT NOT NULL,
    subject TEXT NOT NULL,
    file_name TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE recipients (
    email_id INTEGER NOT NULL,
    address TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('to', 'cc', 'bcc')),
    PRIMARY KEY (email_id, address, kind)
) WITHOUT ROWID;
CREATE TABLE inboxes (
    address_id INTEGER NOT NULL,
    date TEXT NOT NULL,
    email_id INTEGER NOT NULL,
    PRIMARY KEY (address_id, date, email_id)
) WITHOUT ROWID;
CREATE INDEX inboxes_email ON inboxes (email_id);
CREATE TABLE records (
    source_id INTEGER NOT NULL,
    place TEXT NOT NULL,
    outcome TEXT NOT NULL,
    email_id INTEGER,
    message_id TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (source_id, place)
) WITHOUT ROWID;
CREATE INDEX records_email ON records (email_id);
CREATE INDEX records_copy ON records (message_id) WHERE outcome = 'duplicate';
CREATE VIRTUAL TABLE emails_fts USING fts5 (
    owners, sender, subject, body, content = 'emails', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);
CREATE TRIGGER emails_inserted AFTER INSERT ON emails BEGIN
    INSERT INTO emails_fts (rowid, owners, sender, subject, body)
    VALUES (new.id, new.owners, new.sender, new.subject, new.body);
END;
CREATE TRIGGER emails_deleted AFTER DELETE ON emails BEGIN
    INSERT INTO emails_fts (emails_fts, rowid, owners, sender, subject, body)
    VALUES ('delete', old.id, old.owners, old.sender, old.subject, old.body);
    DELETE FROM recipients WHERE email_id = old.id;
    DELETE FROM inboxes WHERE email_id = old.id;
    UPDATE records SET email_id = NULL, outcome = 'deleted' WHERE email_id = old.id;
END;
CREATE TRIGGER emails_updated AFTER UPDATE ON emails BEGIN
    INSERT INTO emails_fts (emails_fts, rowid, owners, sender, subject, body)
    VALUES ('delete', old.id, old.owners, old.sender, old.subject, old.body);
    INSERT INTO emails_fts (rowid, owners, sender, subject, body)
    VALUES (new.id, new.owners, new.sender, new.subject, new.body);
    UPDATE inboxes SET date = new.date WHERE email_id = new.id AND date <> new.date;
END;
"""


def statements() -> list[str]:
    """The statements of the schema one by one: `executescript` would end the transaction."""
    triggers: list[str] = []
    current = ""
    for line in SCHEMA.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            triggers.append(current)
            current = ""
    return triggers
