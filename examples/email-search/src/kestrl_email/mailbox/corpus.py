"""A generated corpus in the format of Enron's: RFC 822 files in folders of people, with its headers, copies and
defects.

For tests, benchmarks and trying out: every mail is a pure function of seed and number, nobody in it exists. Some mails
have a copy in a second folder with another Message-ID, and some have a defect that real corpora have.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache
from itertools import accumulate
from pathlib import Path

DOMAIN = "northwind.example"
FIRST = ("Alice", "Bruno", "Chandra", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Liam")
LAST = ("Abbott", "Bergen", "Castillo", "Dahl", "Eriksen", "Fontaine", "Gruber", "Hassan", "Ivers", "Jansen", "Kovac")
TOPICS = (
    "pipeline",
    "audit",
    "offsite",
    "budget",
    "contract",
    "forecast",
    "hiring",
    "invoice",
    "outage",
    "server move",
)
PLACES = ("Houston", "Portland", "Oslo", "Lyon", "Chennai", "Quito", "Galway", "Nagoya")
SYLLABLES = (
    "ba",
    "co",
    "di",
    "fer",
    "gul",
    "han",
    "is",
    "jo",
    "ka",
    "lo",
    "mer",
    "nor",
    "pa",
    "qui",
    "ro",
    "sta",
    "tu",
)
WORDS = 20_000
"""Distinct words of the filler text, drawn with Zipf's law."""
COPIED = 0.1
"""Share of mails with a copy in another folder."""
DEFECTIVE = 0.02
"""Share of mails with one of `DEFECTS`."""
BEGIN = datetime(1999, 1, 4, 8, tzinfo=UTC)
MINUTES = 3 * 365 * 24 * 60


@dataclass(frozen=True, slots=True)
class Person:
    """An employee with a mailbox."""

    first: str
    last: str
    number: int

    @property
    def address(self) -> str:
        return f"{self.first}.{self.last}{self.number or ''}@{DOMAIN}".lower()

    @property
    def folder(self) -> str:
        return f"{self.last}{self.number or ''}-{self.first[0]}".lower()


def person(number: int) -> Person:
    """Employee by number."""
    return Person(
        FIRST[number % len(FIRST)], LAST[number // len(FIRST) % len(LAST)], number // (len(FIRST) * len(LAST))
    )


@cache
def vocabulary() -> tuple[list[str], list[float]]:
    """Words of the filler text, the most frequent first, with cumulative weights."""
    rng = random.Random("vocabulary")  # noqa: S311 - a seeded corpus
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(WORDS)]
    return words, list(accumulate(1 / (rank + 3) for rank in range(WORDS)))


def _raw_8bit(lines: dict[str, str]) -> None:
    lines["Subject"] += " caf\udce9"  # a Latin-1 byte in a header


def _bad_charset(lines: dict[str, str]) -> None:
    lines["Content-Type"] = "text/plain; charset=x-unknown-7"


def _bad_date(lines: dict[str, str]) -> None:
    lines["Date"] = "Mon, 32 Foo 0001 25:61:00 -0800 (PST)"


def _no_message_id(lines: dict[str, str]) -> None:
    del lines["Message-ID"]


def _nul(lines: dict[str, str]) -> None:
    lines["Subject"] += "\0"


def _folded(lines: dict[str, str]) -> None:
    lines["To"] = lines["To"].replace(", ", ",\n\t")
    lines["Subject"] = lines["Subject"].replace(" ", "\n ", 1)


def _no_recipient(lines: dict[str, str]) -> None:
    del lines["To"]


def _quoted_names(lines: dict[str, str]) -> None:
    lines["From"] = f"\"'{lines['X-From']}'\" <{lines['From']}>"


DEFECTS: tuple[Callable[[dict[str, str]], None], ...] = (
    _raw_8bit,
    _bad_charset,
    _bad_date,
    _no_message_id,
    _nul,
    _folded,
    _no_recipient,
    _quoted_names,
)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the corpus."""

    name: str
    content: bytes


def mail_files(number: int, seed: int, people: int) -> Iterator[File]:
    """Files of a mail: itself, and for some a copy in the sender's or a recipient's other folder."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - a seeded corpus
    sender, *others = (person(n) for n in rng.sample(range(people), min(people, rng.choice((2, 2, 2, 3, 5)))))
    topic, place = rng.choice(TOPICS), rng.choice(PLACES)
    code = f"{rng.choice(SYLLABLES)}{rng.choice(SYLLABLES)}{number}"
    date = BEGIN + timedelta(minutes=rng.randrange(MINUTES))
    words, weights = vocabulary()
    count = min(2000, int(rng.lognormvariate(5.2, 0.9)))
    filler = rng.choices(words, cum_weights=weights, k=count)
    text = "\n".join(" ".join(filler[start : start + 12]) for start in range(0, count, 12))
    fact = (
        f"The {topic} {code} in {place} costs {rng.randint(10, 990) * 10} "
        f"dollars; ask {others[0].first} by {date:%d %B}."
    )
    headers = {
        "Message-ID": f"<{rng.getrandbits(40)}.{number}.JavaMail.evans@thyme>",
        "Date": format_datetime(date.astimezone()),
        "From": sender.address,
        "To": ", ".join(other.address for other in others),
        "Subject": f"{rng.choice(('', 'Re: ', 'FW: '))}{topic} {code}",
        "Mime-Version": "1.0",
        "Content-Type": "text/plain; charset=us-ascii",
        "Content-Transfer-Encoding": "7bit",
        "X-From": f"{sender.first} {sender.last}",
        "X-To": ", ".join(f"{other.first} {other.last}" for other in others),
        "X-cc": "",
        "X-bcc": "",
        "X-Folder": f"\\{sender.first}_{sender.last}\\Notes Folders\\Sent",
        "X-Origin": sender.last.upper(),
        "X-FileName": f"{sender.last.lower()}.nsf",
    }
    if rng.random() < DEFECTIVE:
        rng.choice(DEFECTS)(headers)
    yield File(f"maildir/{sender.folder}/sent/{number}.", _written(headers, f"{text}\n\n{fact}\n"))
    if rng.random() < COPIED:
        headers["Message-ID"] = f"<{rng.getrandbits(40)}.{number}.copy@thyme>"
        headers["X-Folder"] = f"\\{others[0].first}_{others[0].last}\\Notes Folders\\All documents"
        yield File(f"maildir/{others[0].folder}/all_documents/{number}.", _written(headers, f"{text}\n\n{fact}\n"))


def _written(headers: dict[str, str], body: str) -> bytes:
    head = "".join(f"{name}: {value}\n" for name, value in headers.items())
    return f"{head}\n{body}".encode("utf-8", "surrogateescape")


def malformed_files() -> Iterator[File]:
    """Files that are not mails: empty, and without headers."""
    yield File("maildir/malformed/1.", b"")
    yield File("maildir/malformed/2.", b"\x00\x01\x02 no headers here\n\njust text\n")


def corpus(mails: int, seed: int, people: int) -> Iterator[File]:
    """All files of a corpus."""
    for number in range(mails):
        yield from mail_files(number, seed, people)
    yield from malformed_files()


def write_maildir(folder: Path, mails: int, *, seed: int, people: int) -> int:
    """Writes a corpus as files; returns their number."""
    count = 0
    for file in corpus(mails, seed, people):
        path = folder / file.name.partition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        count += 1
    return count


def write_archive(path: Path, mails: int, *, seed: int, people: int) -> int:
    """Writes a corpus as .tar.gz; returns the number of files."""
    count = 0
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for file in corpus(mails, seed, people):
            member = tarfile.TarInfo(file.name)
            member.size = len(file.content)
            archive.addfile(member, io.BytesIO(file.content))
            archive.members = []  # type: ignore[attr-defined] - tarfile keeps every header
            count += 1
    return count
