"""Builds the mail database: reads a source, parses in worker processes, writes in order, shows progress."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kestrl.errors import KestrlError
from kestrl.terminal import safe_line
from kestrl.tools.shapes import is_list, is_mapping
from kestrl_email.mailbox.database import HEAD_BYTES, Filters, MailWriter, Outcome
from kestrl_email.mailbox.kind import Kind
from kestrl_email.mailbox.message import Malformed, ParsedMail, from_fields, parse
from kestrl_email.mailbox.sources import Record, kind_of, opened, records, total_of
from kestrl_email.mailbox.time_limit import TimeLimitExceeded, within

BATCH_RECORDS, BATCH_BYTES = 256, 4 * 1024 * 1024
"""Records and bytes that are parsed together."""
MAIL_SECONDS = 10.0
"""Maximum CPU seconds for parsing one mail; ordinary ones take milliseconds, 64 MiB of attachments two seconds."""
IN_FLIGHT = 2
"""Batches per worker that are being parsed or wait for being written."""
COMMIT_SECONDS = 5.0
"""Maximum seconds of work that a killed build repeats."""
PLAIN_SECONDS = 15.0
"""Seconds between lines without a terminal."""

Parsed = tuple[str, int, ParsedMail | str]
"""Place, position, and the mail or why there is none."""


@dataclass(slots=True)
class BuildResult:
    """What a build did."""

    added: Counter[str] = field(default_factory=Counter[str])
    """Records of this build, by outcome."""
    total: dict[str, int] = field(default_factory=dict[str, int])
    """Records of all builds, by outcome."""
    malformed: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Source, place and reason of the first malformed records of all builds."""


def parse_batch(batch: list[Record]) -> list[Parsed]:
    """Parses records, in the main thread of a process."""
    return [(record.place, record.position, _parsed(record)) for record in batch]


def _parsed(record: Record) -> ParsedMail | str:
    content = record.content
    if content is None:
        return record.problem
    try:
        return within(MAIL_SECONDS, lambda: parse(content) if isinstance(content, bytes) else from_fields(content))
    except Malformed as error:
        return str(error)
    except TimeLimitExceeded:
        return f"takes more than {MAIL_SECONDS:.0f} s to parse"


def record_batches(stream: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in stream:
        batch.append(record)
        size += _size(record.content)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if is_mapping(value):
        return sum(map(_size, value.values()))
    return sum(len(item) for item in value if isinstance(item, str)) if is_list(value) else 0


def _in_order(batches: Iterator[list[Record]], pool: Executor | None, limit: int) -> Iterator[list[Parsed]]:
    """Parsed batches in the order of the source; at most `limit` are in flight."""
    if pool is None:
        yield from map(parse_batch, batches)
        return
    flying: deque[Future[list[Parsed]]] = deque()
    try:
        for batch in batches:
            flying.append(pool.submit(parse_batch, batch))
            if len(flying) >= limit:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool as error:
        raise KestrlError("a parser process ended unexpectedly (out of memory?); run the same command again") from error


class _Bar:
    """Progress: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console, self._began, self._shown = console, time.monotonic(), time.monotonic()
        columns = (
            SpinnerColumn(),
            *((BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) if total else ()),
            TextColumn("{task.fields[seen]} records, {task.fields[rate]:.0f}/s"),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("", total=total, seen=0, rate=0.0) if self._bar else None

    def shown(self) -> AbstractContextManager[object]:
        return self._bar or nullcontext()

    def update(self, position: int, seen: int) -> None:
        rate = seen / max(1e-9, time.monotonic() - self._began)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=position, seen=seen, rate=rate)
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._console.print(f"{seen} records, {rate:.0f}/s")


def build_database(
    sources: list[Path],
    out: Path,
    *,
    filters: Filters,
    console: Console,
    kind: Kind | None = None,
    owner: str = "",
    workers: int = 1,
) -> BuildResult:
    """Reads sources into a database, new or not. What was read before is not read again.

    Raises:
        UserInputError: A source or the database cannot be used.
    """
    kinds = [(path, kind or kind_of(path)) for path in sources]
    writer = MailWriter(out, filters)
    result = BuildResult()
    keep = False
    try:
        for path, format_ in kinds:
            _read(path, format_, writer, result.added, console, owner=owner, workers=workers)
        if result.added[Outcome.MAIL] or result.added[Outcome.DUPLICATE]:
            writer.optimise()
        result.total = dict(writer.counts())
        result.malformed = writer.malformed(20)
        keep = True
    finally:
        writer.close(keep=keep)
    return result


def _read(
    path: Path, kind: Kind, writer: MailWriter, added: Counter[str], console: Console, *, owner: str, workers: int
) -> None:
    total = total_of(path, kind)
    head = b""
    if kind is not Kind.MAILDIR:
        with opened(path) as file:
            head = file.read(HEAD_BYTES)
    source = writer.source(path, kind, total, head)
    stream = records(path, kind, lambda place: writer.knows(source, place))
    bar = _Bar(console, total)
    # spawn: the parent has threads (the progress bar), which must not be forked.
    here = workers == 1 and threading.current_thread() is threading.main_thread()  # for the limit on a mail's time
    pool = None if here else ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    committed = time.monotonic()
    seen = reached = 0
    with bar.shown(), pool or nullcontext():
        for batch in _in_order(record_batches(stream), pool, IN_FLIGHT * workers):
            for place, position, mail in batch:
                if isinstance(mail, str):
                    console.print(safe_line(f"malformed: {path}: {place}: {mail}"), markup=False, soft_wrap=True)
                    outcome = writer.refuse(source, place, mail)
                else:
                    outcome = writer.add(source, place, mail, owner=owner)
                added[outcome] += 1
                seen += 1
                reached = position
            bar.update(reached, seen)
            if time.monotonic() - committed >= COMMIT_SECONDS:
                writer.commit()
                committed = time.monotonic()
        writer.commit()
