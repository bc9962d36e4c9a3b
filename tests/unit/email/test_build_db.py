"""`kestrl email build-db`: every source, real defects, copies, filters, resuming, and a full-text index that stays
correct."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

from kestrl._app.cli.main import main
from kestrl.errors import UserInputError
from kestrl_email.commands import email
from kestrl_email.mailbox.build import BuildResult, build_database
from kestrl_email.mailbox.corpus import corpus, write_archive, write_maildir
from kestrl_email.mailbox.database import Filters, check_integrity, open_database, rows_digest
from kestrl_email.mailbox.kind import Kind
from kestrl_email.mailbox.message import Malformed, ParsedMail, from_fields, parse
from kestrl_email.mailbox.sources import records

ENRON = b"""Message-ID: <18782981.1075855378110.JavaMail.evans@thyme>
Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)
From: Phillip.Allen@enron.example
To: tim.belden@enron.example, JOHN.LAVORATO@enron.example
Cc: tim.belden@enron.example
Subject: Here is our
 forecast
Mime-Version: 1.0
Content-Type: text/plain; charset=us-ascii
Content-Transfer-Encoding: 7bit
X-From: Phillip K Allen
X-Folder: \\Phillip_Allen_Jan2002_1\\Allen, Phillip K.\\'Sent Mail
X-FileName: pallen (Non-Privileged).pst

Here is our forecast
"""


def build(source: Path, out: Path, *, workers: int = 1, filters: Filters | None = None, **options: Any) -> BuildResult:
    console = Console(file=StringIO())
    return build_database([source], out, filters=filters or Filters(), console=console, workers=workers, **options)


def rows(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(open_database(path)) as connection:
        return [tuple(row) for row in connection.execute(query, values)]


def mail(**headers: str) -> bytes:
    """A mail with these headers (underscores are dashes) and the text `body`."""
    body = headers.pop("body", "text")
    lines = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in headers.items())
    return f"{lines}\n{body}".encode("utf-8", "surrogateescape")


# --- the parser


def test_an_enron_mail_is_read():
    assert parse(ENRON) == ParsedMail(
        message_id="<18782981.1075855378110.JavaMail.evans@thyme>",
        date="2001-05-14 23:39:00",
        from_address="phillip.allen@enron.example",
        from_name="",
        recipients=(
            ("tim.belden@enron.example", "to"),
            ("john.lavorato@enron.example", "to"),
            ("tim.belden@enron.example", "cc"),
        ),
        subject="Here is our forecast",
        body="Here is our forecast",
        folder="\\Phillip_Allen_Jan2002_1\\Allen, Phillip K.\\'Sent Mail",
    )


@pytest.mark.parametrize(
    ("value", "subject"),
    [
        ("=?utf-8?q?caf=C3=A9?= =?utf-8?b?IPCfmIA=?=", "café 😀"),
        ("=?iso-8859-1?q?caf=E9?=", "café"),
        ("=?x-none?q?caf=E9?=", "café"),
        ("=?utf-8?b?not base64", "=?utf-8?b?not base64"),
        ("=?utf-8?b?A?=", None),
        ("caf\udce9", "café"),
        ("a\0b\n\tc", "ab c"),
    ],
)
def test_a_damaged_subject_becomes_text(value: str, subject: str | None):
    found = parse(mail(From="a@b.example", Subject=value)).subject
    assert subject is None or found == subject
    assert "\0" not in found


@pytest.mark.parametrize(
    ("date", "stored"),
    [
        ("Fri, 31 Dec 1999 23:30:00 -0800 (PST)", "2000-01-01 07:30:00"),
        ("31 Dec 99 23:30 EST", "2000-01-01 04:30:00"),
        ("2001-05-14T16:39:00+02:00", "2001-05-14 14:39:00"),
        ("Mon, 1 Jan 0001 00:00:00 -0000", ""),
        ("Mon, 32 Foo 2001 25:61:00", ""),
        ("Tue, 1 Jan 2471 00:00:00 +0000", ""),
        ("Thu, 31 Feb 2002 10:00:00 +0000", ""),
        ("", ""),
    ],
)
def test_a_date_is_utc_or_unknown(date: str, stored: str):
    assert parse(mail(From="a@b.example", Date=date)).date == stored


def test_a_bad_date_is_replaced_by_that_of_a_received_header():
    raw = mail(Received="from x by y; Mon, 14 May 2001 10:00:00 +0000", From="a@b.example", Date="yesterday")
    assert parse(raw).date == "2001-05-14 10:00:00"


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("\"'Allen, Phillip'\" <Phillip.Allen@enron.example>", "phillip.allen@enron.example"),
        ("'bill.white@enron.example'", "bill.white@enron.example"),
        ("=?utf-8?q?Ren=C3=A9?= <rene@x.example>", "rene@x.example"),
        ("root", ""),
        ("", ""),
    ],
)
def test_an_address_is_lower_case_and_bare(value: str, address: str):
    assert parse(mail(From=value, Subject="s")).from_address == address


def test_entries_of_a_list_that_are_not_addresses_are_left_out():
    raw = mail(From="a@b.example", To='undisclosed-recipients:;, "x, y" <X@b.example>,\n\tz@b.example')
    assert [address for address, _ in parse(raw).recipients] == ["x@b.example", "z@b.example"]


@pytest.mark.parametrize("charset", ["x-unknown", "us-ascii", "rot13", "utf-8", ""])
def test_a_body_in_a_wrong_character_set_is_read(charset: str):
    head = f"From: a@b.example\nContent-Type: text/plain; charset={charset}\n\n".encode()
    assert parse(head + b"caf\xe9\x00 ol\xe9").body == "café olé"


def test_text_parts_come_before_html_and_attachments_are_left_out():
    raw = b"""From: a@b.example
Content-Type: multipart/mixed; boundary="x"

--x
Content-Type: text/html

<html><head><title>no</title><style>p {}</style></head><p>Hello&nbsp;there</p><div>second</div></html>
--x
Content-Type: text/plain
Content-Disposition: attachment; filename=a.txt

secret attachment
--x--
"""
    assert parse(raw).body == "Hello there\nsecond"
    plain = b"--x\nContent-Type: text/plain\n\nplain words\n"
    assert (
        parse(raw.replace(b"--x\nContent-Type: text/html", plain + b"--x\nContent-Type: text/html")).body
        == "plain words"
    )


@pytest.mark.parametrize(("raw", "why"), [(b"", "empty"), (b"\n \n", "empty"), (b"\x00\x01 garbage\n\nx", "headers")])
def test_a_record_that_is_not_a_mail_is_malformed(raw: bytes, why: str):
    with pytest.raises(Malformed, match=why):
        parse(raw)


def test_parts_nested_a_thousand_deep_do_not_break_the_build():
    raw = b"From: a@b.example\n" + b"".join(
        b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(1500)
    )
    with pytest.raises(Malformed, match="RecursionError"):
        parse(raw)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_mail_or_malformed(raw: bytes):
    try:
        found = parse(b"From: a@b.example\nSubject: " + raw)
    except Malformed:
        return
    json.dumps([found.subject, found.body, found.date]).encode()
    assert "\0" not in found.subject + found.body + found.message_id
    f"{found}".encode()


def test_columns_of_the_wrong_type_are_malformed():
    for fields in ({"from": 3, "body": "x"}, {"from": "a@b.example", "to": [1]}, {"to": ["a@b.example"]}):
        with pytest.raises(Malformed):
            from_fields(fields)


# --- sources


def as_mbox(path: Path, mails: list[bytes]) -> Path:
    quoted = [raw.replace(b"\nFrom ", b"\n>From ") for raw in mails]
    path.write_bytes(b"".join(b"From x@y.example Mon May 14 16:39:00 2001\n" + raw + b"\n\n" for raw in quoted))
    return path


def as_csv(path: Path, mails: list[bytes]) -> Path:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "message"])
        writer.writerows([f"allen-p/sent/{n}.", raw.decode("utf-8", "surrogateescape")] for n, raw in enumerate(mails))
    return path


def as_tar(path: Path, mails: list[bytes]) -> Path:
    folder = path.parent / "maildir"
    folder.mkdir()
    for number, raw in enumerate(mails):
        (folder / f"{number}.").write_bytes(raw)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "maildir")
    return path


def as_maildir(path: Path, mails: list[bytes]) -> Path:
    for name in ("cur", "new", "tmp"):
        (path / name).mkdir(parents=True)
    for number, raw in enumerate(mails):
        (path / "cur" / f"{number}:2,S").write_bytes(raw)
    (path / "tmp" / "half").write_bytes(b"From: not-delivered@b.example\n\nhalf")
    (path / "dovecot.index").write_bytes(b"\0")
    return path


def columns(mails: list[bytes]) -> list[dict[str, Any]]:
    parsed = [parse(raw) for raw in mails]
    return [
        {
            "message_id": item.message_id,
            "subject": item.subject,
            "from": item.from_address,
            **{kind: [address for address, each in item.recipients if each == kind] for kind in ("to", "cc", "bcc")},
            "date": item.date + "+00:00",
            "body": item.body,
            "file_name": "x",
        }
        for item in parsed
    ]


def as_jsonl(path: Path, mails: list[bytes]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in columns(mails)))
    return path


def as_parquet(path: Path, mails: list[bytes]) -> Path:
    library: Any = pyarrow
    writer: Any = parquet
    table = library.Table.from_pylist(columns(mails))
    times = table["date"].cast(library.timestamp("us", tz="UTC"))
    writer.write_table(table.set_column(table.schema.get_field_index("date"), "date", times), path)
    return path


MAKERS = {
    "maildir": as_maildir,
    "x.tar.gz": as_tar,
    "x.mbox": as_mbox,
    "x.csv": as_csv,
    "x.jsonl": as_jsonl,
    "x.parquet": as_parquet,
}
SECOND = mail(
    **{"Message-ID": "<2@x>", "From": "tim.belden@enron.example", "To": "phillip.allen@enron.example"},
    Date="Tue, 15 May 2001 10:00:00 +0000",
    Subject="Re: forecast",
    body="Thanks.\nFrom here on it is fine.",
)


@pytest.mark.parametrize("name", MAKERS)
def test_every_format_gives_the_same_mails(tmp_path: Path, name: str):
    source = MAKERS[name](tmp_path / name, [ENRON, SECOND])
    out = tmp_path / "mail.db"
    assert build(source, out).added == {"mail": 2}
    found = rows(out, "SELECT message_id, date, from_address, subject, body FROM emails ORDER BY date")
    expected = [parse(ENRON), parse(SECOND)]
    assert found == [(m.message_id, m.date, m.from_address, m.subject, m.body) for m in expected]
    assert rows(out, "SELECT count(*) FROM recipients") == [(4,)]
    before = rows_digest(out)
    assert build(source, out).added == {}
    assert rows_digest(out) == before


def test_the_workplace_mails_are_read_as_jsonl(tmp_path: Path):
    source = tmp_path / "mails.jsonl"
    row = {"email_id": "00000373", "sender/recipient": "santiago.martinez@atlas.com", "body": "Sam,\n\nDone."}
    source.write_text(json.dumps({"from": row["sender/recipient"], "to": "sam@atlas.com", "body": row["body"]}))
    assert build(source, tmp_path / "mail.db").added == {"mail": 1}


def test_growing_sources_add_what_is_new(tmp_path: Path):
    out, source = tmp_path / "mail.db", as_mbox(tmp_path / "x.mbox", [ENRON])
    build(source, out)
    as_mbox(tmp_path / "x.mbox", [ENRON, SECOND])
    assert build(source, out).added == {"mail": 1}
    as_mbox(tmp_path / "x.mbox", [SECOND])
    with pytest.raises(UserInputError, match="another file"):
        build(source, out)


def test_a_malformed_record_is_reported_with_its_path_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = as_maildir(tmp_path / "m", [ENRON])
    (folder / "new" / "bad").write_bytes(b"\x00")
    (folder / "new" / "gone").symlink_to(tmp_path / "nowhere")
    out = tmp_path / "mail.db"
    arguments = ["kestrl", "email", "build-db", "--source", str(folder), "--out", str(out), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    for again in (False, True):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        printed = capsys.readouterr()
        assert f"{out}: 1 mails, 2 malformed" in printed.out
        assert ("read 0 new records" in printed.out) == again
        assert f"malformed: {folder}: new/bad: no mail headers" in printed.err
        assert "new/gone: not a regular file" in printed.err


def test_a_link_is_no_mail_of_the_folder(tmp_path: Path):
    """It may lead to somebody else's mail, which the model would then search."""
    other = as_maildir(tmp_path / "other", [SECOND])
    folder = as_maildir(tmp_path / "m", [ENRON])
    (folder / "new" / "link").symlink_to(next(path for path in other.rglob("*") if path.is_file()))
    (folder / "new" / "loop").symlink_to(folder)
    found = {record.place: record for record in records(folder, Kind.MAILDIR, lambda _: False)}
    assert found["new/link"].content is None
    assert found["new/link"].problem == "not a regular file"
    assert sum(record.content is not None for record in found.values()) == 1


def test_a_damaged_archive_keeps_what_was_read(tmp_path: Path):
    archive = tmp_path / "c.tar.gz"
    write_archive(archive, 800, seed=1, people=20)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserInputError, match="damaged"):
        build(archive, tmp_path / "mail.db")
    archive.write_bytes(whole)
    build(archive, tmp_path / "mail.db")
    build(archive, tmp_path / "fresh.db")
    query = "SELECT message_id FROM emails ORDER BY 1"
    assert rows(tmp_path / "mail.db", query) == rows(tmp_path / "fresh.db", query)


@pytest.mark.parametrize(("name", "content"), [("x.parquet", b"PAR1"), ("x.csv", b"a,b\n1,2\n"), ("x.tar.gz", b"no")])
def test_a_source_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserInputError, match="--source"):
        build(tmp_path / name, tmp_path / "mail.db")


def test_unknown_sources_and_databases_are_refused(tmp_path: Path):
    with pytest.raises(UserInputError, match="does not exist"):
        build(tmp_path / "none", tmp_path / "mail.db")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserInputError, match="--format"):
        build(tmp_path / "notes.txt", tmp_path / "mail.db")
    source = as_mbox(tmp_path / "x.mbox", [ENRON])
    (tmp_path / "text.db").write_text("hello " * 400)
    with pytest.raises(UserInputError, match="not a database"):
        build(source, tmp_path / "text.db")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (x)")
    with pytest.raises(UserInputError, match="not a mail database"):
        build(source, tmp_path / "other.db")
    assert rows_of_other(tmp_path / "other.db") == ["t"]


def rows_of_other(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]


# --- copies, filters, inboxes


def copy_of(raw: bytes, message_id: str, to: str) -> bytes:
    changed = raw.replace(b"<2@x>", message_id.encode())
    return changed.replace(b"To: phillip.allen@enron.example", b"To: " + to.encode())


def test_copies_are_one_mail_with_all_recipients(tmp_path: Path):
    copies = [SECOND, copy_of(SECOND, "<3@x>", "john@enron.example"), SECOND.replace(b"Thanks.\n", b"Thanks. \r\n")]
    out = tmp_path / "mail.db"
    assert build(as_mbox(tmp_path / "x.mbox", copies), out).added == {"mail": 1, "duplicate": 2}
    assert rows(out, "SELECT address FROM recipients") == [("john@enron.example",), ("phillip.allen@enron.example",)]
    with closing(open_database(out)) as connection:
        assert len(connection.execute("SELECT * FROM inboxes").fetchall()) == 3
    with closing(sqlite3.connect(out)) as connection:
        check_integrity(connection)


def test_equal_texts_of_different_days_are_two_mails_unless_folded(tmp_path: Path):
    later = SECOND.replace(b"<2@x>", b"<3@x>").replace(b"15 May", b"22 May")
    source = as_mbox(tmp_path / "x.mbox", [SECOND, later])
    assert build(source, tmp_path / "a.db").added == {"mail": 2}
    assert build(source, tmp_path / "b.db", filters=Filters(fold_days=True)).added == {"mail": 1, "duplicate": 1}


def test_different_mails_with_one_message_id_are_both_kept(tmp_path: Path):
    other = SECOND.replace(b"15 May", b"16 May").replace(b"Thanks", b"No")
    nameless = SECOND.replace(b"Message-ID: <2@x>\n", b"").replace(b"Thanks", b"Hi")
    out = tmp_path / "mail.db"
    assert build(as_mbox(tmp_path / "x.mbox", [SECOND, other, nameless]), out).added == {"mail": 3}
    ids = [message_id for (message_id,) in rows(out, "SELECT message_id FROM emails ORDER BY id")]
    assert ids[0] == "<2@x>"
    assert all(message_id.endswith("@generated.invalid>") for message_id in ids[1:])


def test_the_filters_of_art_e_are_options_and_stay_with_the_database(tmp_path: Path):
    crowd = SECOND.replace(b"<2@x>", b"<3@x>").replace(
        b"To: phillip", b"To: " + b", ".join(b"p%d@x.example" % n for n in range(31)) + b", phillip"
    )
    long = SECOND.replace(b"<2@x>", b"<4@x>").replace(b"Thanks.", b"x" * 5001)
    source = as_mbox(tmp_path / "x.mbox", [SECOND, crowd.replace(b"Thanks", b"All"), long])
    out = tmp_path / "mail.db"
    filters = Filters(max_body=5000, max_recipients=30)
    assert build(source, out, filters=filters).added == {"mail": 1, "filtered": 2}
    assert build(source, tmp_path / "all.db").added == {"mail": 3}
    with pytest.raises(UserInputError, match="--max-body was 5000"):
        build(source, out)


def test_the_owner_of_a_source_has_all_its_mails(tmp_path: Path):
    out = tmp_path / "mail.db"
    build(as_mbox(tmp_path / "x.mbox", [ENRON, SECOND]), out, owner="me@home.example")
    printed = CliRunner().invoke(email, ["inboxes", str(out)]).output
    assert Counter(line.split()[0] for line in printed.splitlines()) == {"2": 3, "1": 1}
    assert "2  me@home.example" in printed
    listed = json.loads(CliRunner().invoke(email, ["inboxes", str(out), "--json"]).output)
    assert {"inbox": "me@home.example", "mails": 2} in listed


# --- the full-text index


@pytest.fixture
def some(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    folder = tmp_path / "maildir"
    write_maildir(folder, 60, seed=3, people=8)
    build(folder, tmp_path / "mail.db")
    with closing(sqlite3.connect(tmp_path / "mail.db")) as connection:
        yield connection


def matches(connection: sqlite3.Connection, word: str) -> list[int]:
    query = "SELECT rowid FROM emails_fts WHERE emails_fts MATCH ? ORDER BY rowid"
    return [row for (row,) in connection.execute(query, (word,))]


def test_the_index_is_correct_after_update_and_delete(some: sqlite3.Connection):
    some.execute("UPDATE emails SET body = 'zebra crossing' WHERE id IN (3, 4)")
    assert matches(some, "zebra") == [3, 4]
    some.execute("DELETE FROM emails WHERE id = 3")
    some.execute("UPDATE emails SET date = '2031-01-01 00:00:00' WHERE id = 4")
    assert matches(some, "zebra") == [4]
    check_integrity(some)
    for table in ("recipients", "inboxes"):
        assert some.execute(f"SELECT count(*) FROM {table} WHERE email_id = 3").fetchone() == (0,)
    dates = some.execute("SELECT DISTINCT date FROM inboxes WHERE email_id = 4").fetchall()
    assert dates == [("2031-01-01 00:00:00",)]


def test_a_wrong_index_is_found(some: sqlite3.Connection):
    some.execute("DROP TRIGGER emails_updated")
    some.execute("UPDATE emails SET body = 'zebra' WHERE id = 3")
    with pytest.raises(UserInputError, match="differs"):
        check_integrity(some)


def test_a_deleted_mail_does_not_come_back(some: sqlite3.Connection, tmp_path: Path):
    some.execute("DELETE FROM emails WHERE id = 3")
    some.commit()
    some.close()
    assert build(tmp_path / "maildir", tmp_path / "mail.db").added == {}
    assert rows(tmp_path / "mail.db", "SELECT count(*) FROM emails WHERE id = 3") == [(0,)]


# --- resuming


def test_parallel_and_serial_builds_are_equal(tmp_path: Path):
    archive = tmp_path / "c.tar.gz"
    count = write_archive(archive, 600, seed=1, people=20)
    for workers in (1, 2):
        result = build(archive, tmp_path / f"{workers}.db", workers=workers)
        assert result.added.total() == count
        assert result.added["malformed"] == 2
        assert result.added["duplicate"] > 20
    assert rows_digest(tmp_path / "1.db") == rows_digest(tmp_path / "2.db")


@pytest.mark.slow
def test_a_killed_build_is_continued_and_is_equal_to_an_undisturbed_one(tmp_path: Path):
    archive, out = tmp_path / "c.tar.gz", tmp_path / "killed.db"
    count = write_archive(archive, 2500, seed=2, people=50)
    program = (
        "from kestrl_email.mailbox import build; build.COMMIT_SECONDS = 0; "
        "from kestrl._app.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "email", "build-db"]
    command += ["--source", str(archive), "--out", str(out), "--workers", "1"]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 50
    wal = out.with_name("killed.db-wal")
    while not (out.exists() and out.stat().st_size > 100_000):  # the first checkpoint of committed mails
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert wal.exists()
    result = build(archive, out)
    assert 0 < result.added.total() < count
    assert sum(result.total.values()) == count
    build(archive, tmp_path / "whole.db")
    assert rows_digest(out) == rows_digest(tmp_path / "whole.db")
    with closing(sqlite3.connect(out)) as connection:
        check_integrity(connection)


def test_two_builds_of_one_database_at_a_time_are_refused(tmp_path: Path):
    from kestrl_email.mailbox.database import MailWriter

    writer = MailWriter(tmp_path / "mail.db", Filters())
    with pytest.raises(UserInputError, match="written by another process"):
        MailWriter(tmp_path / "mail.db", Filters())
    writer.close(keep=True)
    MailWriter(tmp_path / "mail.db", Filters()).close(keep=True)


def test_the_corpus_is_a_function_of_its_seed():
    first = [file.content for file in corpus(50, 5, 10)]
    assert first == [file.content for file in corpus(50, 5, 10)]
    assert first != [file.content for file in corpus(50, 6, 10)]
    assert gzip.compress(b"".join(first))
