"""A synthetic mailbox world: seeded, deterministic, and split by construction.

Every task draws a person and a topic made of random syllables, and three to five mails that share the person or the
topic with the right one; one attribute of the right mail is asked for. A stable hash of a name decides which split may
use it, so that no person and no topic of the held-out questions can occur in warm-up or training. Every task has an
inbox of its own.
"""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory


class Split(IntEnum):
    """Splits of the data; the value is the share of names by hash."""

    WARM_UP = 0
    TRAIN = 1
    VALIDATION = 2


ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io")
CODAS = ("", "l", "m", "n", "r", "s", "t", "x")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EDITION = 3
"""Increase with every change of mails, questions or rows for a seed: files of older editions are not reused."""
SYSTEM_PROMPT = "Find the answer in the mailbox."
DOMAIN = "acme.example"
OWNER = f"me@{DOMAIN}"
"""Address of the owner of every inbox."""
ATTRIBUTES = ("day", "room", "cost")
QUESTIONS = {
    "day": ("On which day is the {topic} meeting of {person}?", "When does {person} meet about {topic}?"),
    "room": ("In which room is the {topic} meeting of {person}?", "Where does {person} meet about {topic}?"),
    "cost": ("What is the cost of {topic} that {person} wrote about?", "How much is {topic}, as {person} says?"),
}
BODIES = (
    "The {topic} meeting is on {day} in room {room}. The cost is {cost}.",
    "We meet about {topic} in room {room} on {day}. It comes at a cost of {cost}.",
    "The cost of {topic} is {cost}. Room {room}, {day}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """One mail of an inbox."""

    inbox: str
    message_id: str
    """Unique in its inbox."""
    date: str
    """YYYY-MM-DD."""
    sender: str
    """A person; the address is `sender@DOMAIN`."""
    subject: str
    body: str
    facts: dict[str, str]
    """Every attribute the body states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question about one inbox."""

    id: str
    inbox: str
    person: str
    topic: str
    attribute: str
    question: str
    mails: tuple[Mail, ...]
    """The right one first."""

    @property
    def message_id(self) -> str:
        """The right mail."""
        return self.mails[0].message_id

    @property
    def answer(self) -> str:
        return self.mails[0].facts[self.attribute]


def split_of(word: str) -> Split:
    """The split that may use a word, whatever its case."""
    return Split(hashlib.sha256(word.lower().encode()).digest()[0] % len(Split))


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)) + rng.choice(CODAS)


def draw_word(rng: random.Random, split: Split, taken: set[str]) -> str:
    """Draws an unused word of the split and marks it as used."""
    while True:
        word = _word(rng, 2)
        if split_of(word) is split and word not in taken:
            taken.add(word)
            return word


def _facts(rng: random.Random) -> dict[str, str]:
    return {
        "day": rng.choice(DAYS),
        "room": str(rng.randint(100, 499)),
        "cost": str(rng.randint(10, 99) * 10),
    }


def make_task(split: Split, number: int, seed: int) -> Task:
    """Task `number` of a split: a pure function of its arguments."""
    rng = random.Random(f"{seed}/{split.name}/{number}")  # noqa: S311 - a seeded world, not a secret
    used_words: set[str] = set()
    people = [draw_word(rng, split, used_words).capitalize() for _ in range(2)]
    topics = [draw_word(rng, split, used_words) for _ in range(3)]
    person, topic = people[0], topics[0]
    others = [(person, topics[1]), (people[1], topic)]
    others += rng.sample([(person, topics[2]), (people[1], topics[1])], rng.randint(0, 2))
    inbox = f"{split.name.lower()}-{number}"
    ids = rng.sample(range(10, 100), len(others) + 1)
    written = [(*pair, _facts(rng)) for pair in [(person, topic), *others]]
    mails = tuple(
        Mail(
            inbox=inbox,
            message_id=f"m{ids[position]}",
            date=f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            sender=sender,
            subject=about,
            body=rng.choice(BODIES).format(topic=about, **facts),
            facts=facts,
        )
        for position, (sender, about, facts) in enumerate(written)
    )
    attribute = rng.choice(ATTRIBUTES)
    return Task(
        id=inbox,
        inbox=inbox,
        person=person,
        topic=topic,
        attribute=attribute,
        question=rng.choice(QUESTIONS[attribute]).format(person=person, topic=topic),
        mails=mails,
    )


def make_tasks(split: Split, count: int, seed: int) -> Iterator[Task]:
    """The first `count` tasks of a split."""
    return (make_task(split, number, seed) for number in range(count))


@contextmanager
def whole_or_nothing(path: Path) -> Generator[Path]:
    """Yields a temporary path that is renamed to `path` on success; safe for concurrent writers."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)


SCHEMA = """
CREATE TABLE emails (
    id INTEGER PRIMARY KEY,
    inbox TEXT NOT NULL,
    message_id TEXT NOT NULL,
    date TEXT NOT NULL,
    from_address TEXT NOT NULL,
    sender TEXT NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (inbox, message_id)
);
CREATE TABLE recipients (
    email_id INTEGER NOT NULL REFERENCES emails (id) ON DELETE CASCADE,
    address TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('to', 'cc', 'bcc'))
);
CREATE INDEX recipients_email ON recipients (email_id);
CREATE VIRTUAL TABLE emails_fts USING fts5 (sender, subject, body, content = 'emails', content_rowid = 'id');
"""


def write_database(path: Path, tasks: Iterable[Task]) -> None:
    """Writes the mails of tasks to a new SQLite file, atomically.

    The full-text index is an external-content FTS5 table, filled once by its own `rebuild` after the bulk insert; the
    file is only read afterwards, so that no trigger can bring index and content apart.
    """
    with whole_or_nothing(path) as partial, closing(sqlite3.connect(partial)) as connection:
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)
        for task in tasks:
            for mail in task.mails:
                row = connection.execute(
                    "INSERT INTO emails (inbox, message_id, date, from_address, sender, subject, body) VALUES (?, ?, "
                    "?, ?, ?, ?, ?)",
                    (
                        mail.inbox,
                        mail.message_id,
                        mail.date,
                        f"{mail.sender}@{DOMAIN}",
                        mail.sender,
                        mail.subject,
                        mail.body,
                    ),
                )
                connection.execute(
                    "INSERT INTO recipients (email_id, address, kind) VALUES (?, ?, 'to')",
                    (row.lastrowid, OWNER),
                )
        connection.execute("INSERT INTO emails_fts (emails_fts) VALUES ('rebuild')")
        connection.commit()
