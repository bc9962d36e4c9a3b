"""Questions about the inboxes of a mail database, as rows for training: written by script, by a model, or imported.

Every question belongs to one inbox and has an answer, accepted variants of it, and the mails that hold it. Training and
validation have different inboxes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from kestrl.data.parquet import parquet_rows
from kestrl.data.rows import json_lines
from kestrl.errors import UserInputError
from kestrl_email.mailbox.database import canonical_id, inbox_id
from kestrl_email.world import whole_or_nothing

TOOLS = ("search_emails", "read_email", "return_final_answer")
SYSTEM_PROMPT = (
    "You are an email search agent. Answer the user's question about their mailbox: find the mails with search_emails, "
    "read them with read_email, and end with return_final_answer, which takes the answer and the ids of the mails that "
    'hold it. If the mailbox does not hold the answer, answer "I don\'t know" without sources. '
    "The user's email address is {inbox}. Today's date is {query_date}."
)
FEWEST_MAILS = 20
"""Mails of an inbox about which questions are asked."""
LONGEST_QUERY_GAP = 30
"""Days after the newest evidence on which a question may be asked."""
MOST_COUNTED = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and what is accepted as its answer."""

    inbox: str
    question: str
    answer: str
    message_ids: tuple[str, ...]
    query_date: str
    """YYYY-MM-DD: the day on which it is asked."""
    aliases: tuple[str, ...] = ()
    evidence: str = "any"
    """Whether `any` of the mails is evidence, or `all` are needed."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns of the row, such as the kind of question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """What questions are made of."""

    message_id: str
    date: str
    from_address: str
    sender: str
    subject: str
    body: str


def row_of(question: Question, number: int, database: str) -> dict[str, Any]:
    """The row of a question, in verl's format; it names the database by path or uri."""
    create = {"create_kwargs": {"database": database, "inbox": question.inbox}}
    system = SYSTEM_PROMPT.format(inbox=question.inbox, query_date=question.query_date)
    return {
        "data_source": "kestrl-email/mailbox",
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": question.question}],
        "reward_model": {
            "style": "rule",
            "ground_truth": {
                "answer": question.answer,
                "aliases": list(question.aliases),
                "message_ids": list(question.message_ids),
                "evidence": question.evidence,
            },
        },
        "extra_info": {
            "index": number,
            "inbox": question.inbox,
            "query_date": question.query_date,
            **question.details,
            "need_tools_kwargs": True,
            "tools_kwargs": dict.fromkeys(TOOLS, create),
        },
    }


def write_questions(path: Path, questions: Iterable[Question], database: str) -> int:
    """Writes rows atomically; returns their number."""
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_nothing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for number, question in enumerate(questions):
            file.write(json.dumps(row_of(question, number, database), ensure_ascii=False) + "\n")
            count += 1
    return count


def people(connection: sqlite3.Connection, limit: int) -> list[str]:
    """Addresses with the largest inboxes, of those that also write mail.

    Raises:
        UserInputError: No inbox has enough mails.
    """
    query = (
        "SELECT address FROM inboxes JOIN addresses ON addresses.id = address_id WHERE EXISTS (SELECT 1 FROM emails "
        "WHERE from_address = address) GROUP BY address_id HAVING count(*) >= ? ORDER BY count(*) DESC, address LIMIT ?"
    )
    names = [str(row[0]) for row in connection.execute(query, (FEWEST_MAILS, limit))]
    if not names:
        raise UserInputError(f"no inbox of the database has {FEWEST_MAILS} mails and a sender to ask about")
    return names


def split_inboxes(inboxes: list[str], share: float) -> tuple[list[str], list[str]]:
    """Inboxes for training and for validation: by a hash of the address, at least one each where there are two."""
    ranked = sorted(inboxes, key=lambda address: hashlib.sha256(address.encode()).digest())
    held_out = min(len(ranked) - 1, max(1, round(share * len(ranked)))) if share > 0 else 0
    return ranked[held_out:], ranked[:held_out]


def mails_of(connection: sqlite3.Connection, inbox: str, *, limit: int, shortest: int, longest: int) -> list[Mail]:
    """Dated mails of an inbox with bodies of a length, in the order of their dates: the newest `limit`."""
    query = (
        "SELECT message_id, emails.date, from_address, sender, subject, body FROM inboxes JOIN emails ON emails.id = "
        "email_id WHERE address_id = ? AND inboxes.date <> '' AND length(body) "
        "BETWEEN ? AND ? ORDER BY inboxes.date DESC, email_id DESC LIMIT ?"
    )
    rows = connection.execute(query, (inbox_id(connection, inbox), shortest, longest, limit))
    return [Mail(**dict(row)) for row in rows][::-1]


def asked_on(mails: Iterable[str], rng: random.Random) -> str:
    """A day 1 to 30 days after the newest of some dates."""
    newest = date.fromisoformat(max(mails)[:10])
    return (newest + timedelta(days=rng.randint(1, LONGEST_QUERY_GAP))).isoformat()


def ways_to_write(day: str) -> tuple[str, ...]:
    """A date as people write it."""
    parsed = date.fromisoformat(day[:10])
    month, number = parsed.strftime("%B"), parsed.day
    return (
        f"{month} {number}, {parsed.year}",
        f"{number} {month} {parsed.year}",
        f"{parsed:%d %B %Y}",
        f"{month} {number}",
    )


def scripted(connection: sqlite3.Connection, inbox: str, *, limit: int, seed: int) -> Iterator[Question]:
    """Questions about headers, which need no model: who, when, how many, the first. Each has one right answer.

    Deterministic: a function of the database, the inbox and the seed.
    """
    rng = random.Random(f"{seed}/{inbox}")  # noqa: S311 - seeded on purpose
    mails = [
        mail
        for mail in mails_of(connection, inbox, limit=100_000, shortest=0, longest=1 << 30)
        if mail.from_address not in ("", inbox)
    ]
    makers = (_who(mails), _when(mails), _how_many(mails), _first(mails))
    pool = [item for maker in makers for item in maker]
    rng.shuffle(pool)
    for kind, question, answer, aliases, evidence, dates in pool[:limit]:
        yield Question(
            inbox=inbox,
            question=question,
            answer=answer,
            aliases=aliases,
            message_ids=evidence,
            query_date=asked_on(dates, rng),
            details={"kind": kind},
        )


Item = tuple[str, str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Kind, question, answer, aliases, evidence, dates of the evidence."""


def _who(mails: list[Mail]) -> Iterator[Item]:
    counts = Counter((mail.subject, mail.date[:10]) for mail in mails)
    for mail in mails:
        if mail.subject and counts[mail.subject, mail.date[:10]] == 1:
            name = mail.sender.removesuffix(mail.from_address).strip()
            question = f'Who sent the mail "{mail.subject}" on {mail.date[:10]}? Give the address.'
            yield "who", question, mail.from_address, (name,) if name else (), (mail.message_id,), (mail.date,)


def _when(mails: list[Mail]) -> Iterator[Item]:
    counts = Counter((mail.subject, mail.from_address) for mail in mails)
    for mail in mails:
        if mail.subject and counts[mail.subject, mail.from_address] == 1:
            question = f'On which day was the mail "{mail.subject}" from {mail.from_address} sent?'
            yield "when", question, mail.date[:10], ways_to_write(mail.date), (mail.message_id,), (mail.date,)


def _how_many(mails: list[Mail]) -> Iterator[Item]:
    by_month: dict[tuple[str, str], list[Mail]] = {}
    for mail in mails:
        by_month.setdefault((mail.from_address, mail.date[:7]), []).append(mail)
    for (sender, month), sent in by_month.items():
        if 2 <= len(sent) <= MOST_COUNTED:
            named = date.fromisoformat(f"{month}-01").strftime("%B %Y")
            question = f"How many mails did {sender} send in {named}? Answer with a number."
            ids = tuple(mail.message_id for mail in sent)
            yield "how_many", question, str(len(sent)), (), ids, tuple(mail.date for mail in sent)


def _first(mails: list[Mail]) -> Iterator[Item]:
    by_sender: dict[str, list[Mail]] = {}
    for mail in mails:
        by_sender.setdefault(mail.from_address, []).append(mail)
    for sender, sent in by_sender.items():
        if len(sent) > 1 and sent[0].subject and sent[0].date < sent[1].date:
            question = f"What is the subject of the first mail from {sender}?"
            yield "first", question, sent[0].subject, (), (sent[0].message_id,), (sent[0].date,)


def imported(connection: sqlite3.Connection, path: Path) -> Iterator[Question | None]:
    """Questions in ART-E's format (`corbt/enron_emails_sample_questions`, as JSONL or Parquet); None for one whose
    mails are not in the database.

    Raises:
        UserInputError: A row is not in this format.
    """
    for number, fields in enumerate(_raw_rows(path), 1):
        try:
            inbox = str(fields["inbox_address"]).lower()
            ids = [str(message_id) for message_id in fields["message_ids"]]
            known = [_canonical(connection, inbox, message_id) for message_id in ids]
            sources = tuple(dict.fromkeys(message_id for message_id in known if message_id))
            question = Question(
                inbox=inbox,
                question=str(fields["question"]),
                answer=str(fields["answer"]),
                message_ids=sources,
                query_date=date.fromisoformat(str(fields["query_date"])[:10]).isoformat(),
                details={"id": fields.get("id"), "how_realistic": fields.get("how_realistic")},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"{path}:{number}: not a question in ART-E's format: {error!r}") from error
        yield question if sources and None not in known else None


def _canonical(connection: sqlite3.Connection, inbox: str, message_id: str) -> str | None:
    number = inbox_id(connection, inbox)
    canonical = None if number is None else canonical_id(connection, number, message_id)
    return None if canonical is None else canonical[1]


def _raw_rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from (row.columns for row in parquet_rows(path))
    else:
        yield from (value for _, value in json_lines(path))
