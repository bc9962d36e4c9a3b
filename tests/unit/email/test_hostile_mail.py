"""Mail of strangers: bounds of time and size for each message; what is over them is skipped, counted and named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kestrl.errors import UserInputError
from kestrl_email.mailbox import build as building
from kestrl_email.mailbox import sources, tar_stream
from kestrl_email.mailbox.build import BuildResult, build_database
from kestrl_email.mailbox.database import Filters
from kestrl_email.mailbox.html_text import html_text
from kestrl_email.mailbox.kind import Kind
from kestrl_email.mailbox.message import Malformed, from_fields, parse
from kestrl_email.mailbox.sources import Record, records
from kestrl_email.mailbox.time_limit import TimeLimitExceeded, within

MAIL = b"From: a@b.example\nSubject: s\n\nhello\n"
UNITS = (
    *(
        "<!--",
        '<a b="',
        "<a b='",
        "</",
        "<",
        "<![CDATA[",
        "<b>",
        "<a b",
        "&",
        "&#",
        "<!",
        "<?",
        "<script>",
        "<style></",
    ),
    *("<style></", "<a a=1 b=2 ", "</p>", "<a = ", "<a =", '="', "<a/", " ", "--", "-->", "&#1", "\0"),
)


def build(source: Path, out: Path, *, workers: int = 1) -> BuildResult:
    return build_database([source], out, filters=Filters(), console=Console(file=StringIO()), workers=workers)


def read(path: Path, kind: Kind) -> list[Record]:
    return list(records(path, kind, lambda _: False))


def cpu_seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


# --- time of one message


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("before", ["", "<a ", "<script>", "<!--", "<b>" * 50_000])
def test_html_of_a_megabyte_takes_linear_time(before: str, unit: str):
    """Ten times of ordinary HTML; the quadratic parser took minutes to hours for most of these."""
    assert cpu_seconds(lambda: html_text(before + unit * (1_000_000 // len(unit)))) < 5


@pytest.mark.parametrize(
    "html",
    ["<b>" * 300_000 + "</i>" * 250_000, "&#" + "9" * 1_000_000, "&#x" + "f" * 1_000_000, "<a =" + " " * 1_000_000],
    ids=["closed in another order", "decimal", "hexadecimal", "spaces"],
)
def test_html_of_other_tricks_takes_linear_time(html: str):
    assert cpu_seconds(lambda: html_text(html)) < 5


def test_text_of_html_is_what_a_reader_sees():
    html = "<head><title>t</title><body><p title='a>b' don't>1 <2 &lt;x&gt; a&nbsp;b<br>c<!-- no --></p><SCRIPT src=a>"
    assert html_text(f"{html}if (a<b) {{}}</SCRIPT >d <unclosed") == "1 <2 <x> a b\ncd"
    assert html_text("kept<!-- a comment without an end") == "kept"
    assert html_text("&#99999999999;") == "\N{REPLACEMENT CHARACTER}"


HEADERS = {
    "addresses": "From: " + "a@" * 200_000,
    "words": "Subject: " + "=?utf-8?q?a?= " * 60_000,
    "many words": ("Subject: " + "=?utf-8?q?a?= " * 1_000 + "\n") * 60,
    "comments": "To: " + "(" * 100_000,
    "no address": "From: =?" + "a" * 400_000,
    "many": "".join(f"To: <{number}@b.example>, x\n" for number in range(20_000)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_a_mail_are_bounded_together(name: str):
    def refused() -> None:
        with pytest.raises(Malformed, match=r"headers larger than 256 KiB|RecursionError"):
            parse(f"Message-ID: <a@b>\n{HEADERS[name]}\n\nx".encode())

    assert cpu_seconds(refused) < 5
    with pytest.raises(Malformed, match="headers larger than 256 KiB"):
        from_fields({"from": "a@b.example", "to": ["a@" * 1000] * 200})


@pytest.mark.parametrize("unit", ["a@", "=?utf-8?q?a?= ", "(", "a", "<", '"', ",", "a@b,", "=?", "\n "])
def test_headers_within_the_bound_take_seconds_at_most(unit: str):
    value = unit * (250_000 // len(unit))

    def parsed() -> None:
        for header in ("From", "Subject", "Date", "Message-ID"):
            try:
                parse(f"X-Folder: x\n{header}: {value}\n\nx".encode())
            except Malformed as error:
                assert "RecursionError" in str(error)  # noqa: PT017 - either outcome is right

    assert cpu_seconds(parsed) < building.MAIL_SECONDS


def parts(depth: int, lines: int) -> bytes:
    """Parts in parts: each line is compared with the boundaries of all that are open."""
    nested = b"".join(b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(depth))
    return b"From: a@b.example\n" + nested + b"\n--x" * lines


def test_a_mail_that_takes_too_long_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "MAIL_SECONDS", 0.5)
    source = tmp_path / "m.jsonl"
    slow = {"message": parts(100, 1_000_000).decode()}
    source.write_text("\n".join(json.dumps(row) for row in ({"body": "one"}, slow, {"body": "two"})))
    result = build(source, tmp_path / "mail.db")
    assert result.total == {"mail": 2, "malformed": 1}
    assert [(place, note) for _, place, note in result.malformed] == [("line 2", "takes more than 0 s to parse")]


def test_a_limit_of_time_ends_with_its_call():
    def forever() -> Iterator[int]:
        while True:
            yield 1

    with pytest.raises(TimeLimitExceeded):
        within(0.1, lambda: sum(forever()))
    assert within(0.1, lambda: 3) == 3
    assert cpu_seconds(lambda: sum(range(20_000_000))) > 0.1  # no signal is left


def test_a_build_in_a_thread_has_the_limit_of_time(tmp_path: Path):
    source = tmp_path / "m.jsonl"
    source.write_text('{"body": "one"}\n')
    results: list[BuildResult] = []
    thread = threading.Thread(target=lambda: results.append(build(source, tmp_path / "mail.db")))
    thread.start()
    thread.join()
    assert results[0].total == {"mail": 1}


# --- text that is no text


@pytest.mark.parametrize("column", ["from", "subject", "body", "message", "to", "message_id", "date"])
@pytest.mark.parametrize("text", ["\ud83d", "a\udc80\ud800@b.example", "\0", "=?utf-8?b?" + "=" * 9, "9" * 5000])
def test_columns_of_any_text_are_a_mail_or_malformed(tmp_path: Path, column: str, text: str):
    source = tmp_path / "m.jsonl"
    source.write_text(json.dumps({"from": "a@b.example", "body": "x"} | {column: text}) + '\n{"body": "ok"}\n')
    assert sum(build(source, tmp_path / "mail.db").total.values()) == 2


def test_the_name_of_a_row_is_any_text(tmp_path: Path):
    source = tmp_path / "m.csv"
    names = (b"caf\xe9", b"x" * 100_000, b"\0")
    source.write_bytes(b"file,message\n" + b"".join(name + b',"' + MAIL + b'"\n' for name in names))
    result = build(source, tmp_path / "mail.db")
    assert sum(result.total.values()) == 3
    assert all(len(record.place) <= sources.LONGEST_PLACE for record in read(source, Kind.CSV))


# --- sizes of records


@pytest.fixture
def small_mail(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sources, "MAX_BYTES", 10_000)
    return 10_000


ROW = b'2,"From: a@b.example\n\nhello"\n'


@pytest.mark.parametrize(
    "row",
    [
        *(b'1,"' + b"y" * 50_000 + b'"\n', b'1,"' + b"y\n" * 50_000 + b'"\n', b"1," + b"y" * 50_000 + b"\n"),
        *(b'1,"' + b'y""\n' * 50_000 + b'"\n', b'1,"' + b"y" * 9000 + b'","' + b"\nz" * 9000 + b'",3\n'),
    ],
    ids=["quoted", "lines", "bare", "quotes", "columns"],
)
def test_a_row_of_csv_that_is_too_large_is_one_problem(tmp_path: Path, small_mail: int, row: bytes):
    source = tmp_path / "m.csv"
    source.write_bytes(b"file,message\n" + row + ROW)
    first, second = read(source, Kind.CSV)
    assert (first.place, first.content, first.problem) == ("row 2", None, f"not valid CSV: {sources.TOO_LARGE}")
    assert second.place == "2"


def test_a_head_of_csv_that_is_too_large_is_refused(tmp_path: Path, small_mail: int):
    source = tmp_path / "m.csv"
    source.write_bytes(b'"' + b"a\n" * small_mail)
    with pytest.raises(UserInputError, match="no readable line of columns"):
        read(source, Kind.CSV)


def test_a_line_of_jsonl_that_is_too_large_is_one_problem(tmp_path: Path, small_mail: int):
    source = tmp_path / "m.jsonl"
    source.write_bytes(b'{"body": "' + b"y" * 5 * small_mail + b'"}\n{"body": "ok"}\n')
    assert [(record.place, record.problem) for record in read(source, Kind.JSONL)] == [
        ("line 1", sources.TOO_LARGE),
        ("line 2", ""),
    ]


def test_records_of_columns_are_parsed_in_batches_of_bounded_size():
    rows = [Record(f"{n}", {"body": "x" * 1_000_000, "to": ["y" * 1_000_000]}, n) for n in range(8)]
    assert [len(batch) for batch in building.record_batches(iter(rows))] == [3, 3, 2]


# --- archives


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 512)


MEMBER = header("x", len(MAIL)) + padded(MAIL)
END = b"\0" * 1024
LARGE = b"a" * (2 * tar_stream.MAX_EXTENSION)


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g", b"X"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_header_that_is_too_large_is_skipped_and_named(tmp_path: Path, kind: bytes, pack: Callable[[bytes], bytes]):
    source = tmp_path / "m.tar"
    source.write_bytes(pack(MEMBER + header("././@LongLink", len(LARGE), kind) + LARGE + MEMBER + END))
    assert [(record.place, bool(record.content), record.problem) for record in read(source, Kind.TAR)] == [
        ("x", True, ""),
        ("member 2", False, "a header larger than 1024 KiB"),
        ("x", True, ""),
    ]


def pax(**fields: str) -> bytes:
    body = b""
    for name, value in fields.items():
        line = f" {name.replace('_', '.')}={value}\n".encode()
        size = len(line) + 1
        while len(f"{size}") + len(line) != size:
            size += 1
        body += f"{size}".encode() + line
    return header("pax", len(body), b"x") + padded(body)


SPARSE = pax(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_name="y", GNU_sparse_realsize="9")
DAMAGES = {
    "table of a sparse file": SPARSE + header("y", 1 << 31) + b"99999999\n" + b"1\n" * (4 << 20),
    "number of a sparse file": SPARSE + header("y", 1024) + padded(b"x\n"),
    "parts of a sparse file": bytes(bytearray(header("y", 512, b"S"))[:482]) + b"\1" + b"\1" * (4 << 20),
    "chain of names": (header("././@LongLink", 2, b"L") + padded(b"a\0")) * 3000,
    "negative size": header("y", -1024) + MEMBER,
    "negative size of pax": pax(size="-4096") + MEMBER,
    "a size that is no number": pax(size="x") + MEMBER,
    "no header": b"\1" * 512 + MEMBER,
    "name of 3 GiB": header("././@LongLink", 3 << 30, b"L") + b"a" * 4096,
    "attributes of 3 GiB": header("pax", 3 << 30, b"x") + b"a" * 4096,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_archive_that_cannot_be_read_further_keeps_what_was_read(tmp_path: Path, name: str):
    source = tmp_path / "m.tar"
    source.write_bytes(MEMBER + DAMAGES[name] + END)
    out = tmp_path / "mail.db"
    with pytest.raises(UserInputError, match=r"m\.tar is damaged: .*; what was read before is kept"):
        build(source, out)
    source.write_bytes(MEMBER + END)
    assert build(source, out).added.total() <= 1


def test_a_dictionary_of_gigabytes_is_damage(tmp_path: Path):
    packed = bytearray(lzma.compress(MEMBER + END, format=lzma.FORMAT_ALONE))
    source = tmp_path / "m.tar.xz"
    source.write_bytes(packed)
    assert [record.place for record in read(source, Kind.TAR)] == ["x"]
    packed[1:5] = (3 << 30).to_bytes(4, "little")
    source.write_bytes(packed)
    with pytest.raises(UserInputError, match=r"m\.tar\.xz is damaged: Memory usage limit"):
        build(source, tmp_path / "mail.db")


@pytest.mark.parametrize("preset", [0, 6, 9])
def test_streams_of_xz_behind_one_another_are_one_archive(tmp_path: Path, preset: int):
    source = tmp_path / "m.tar.xz"
    halves = MEMBER * 3000 + END
    first, second = (lzma.compress(half, preset=preset) for half in (halves[:700_000], halves[700_000:]))
    source.write_bytes(first + b"\0" * 8 + second)
    assert len(read(source, Kind.TAR)) == 3000
    source.write_bytes(first + second[:-20])
    with pytest.raises(UserInputError, match="is damaged"):
        build(source, tmp_path / "mail.db")


def test_a_line_of_millions_of_values_is_one_problem(tmp_path: Path):
    source = tmp_path / "m.jsonl"
    source.write_bytes(
        b'{"body": [' + b"0," * 5_000_001 + b"0]}\n" + b'{"body": [' + b"[" * 6_000_000 + b"\n" + b"{}\n"
    )
    assert [record.problem for record in read(source, Kind.JSONL)] == ["more than 1000000 values"] * 2 + [""]


def test_global_headers_of_an_archive_do_not_add_up(tmp_path: Path):
    def globals_(number: int) -> bytes:
        record = pax(**{f"k{number}": "v" * 1000})
        return bytes(record[:156]) + b"g" + bytes(record[157:])

    buffer = io.BytesIO()
    for number in range(20):
        raw = bytearray(globals_(number))
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw[:512])
        buffer.write(raw + MEMBER)
    source = tmp_path / "m.tar"
    source.write_bytes(buffer.getvalue() + END)
    with source.open("rb") as file:
        assert max(len(archive.pax_headers) for _, archive in tar_stream.members(file)) == 1
