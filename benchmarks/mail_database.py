"""The mail database at size: building it from a generated .tar.gz in Enron's format, memory, searching its inboxes.

    python benchmarks/mail_database.py [--json]        500,000 mails; KESTRL_MAILS and KESTRL_FOLDER change number and
    place

The build runs as a user starts it, `kestrl email build-db` with two parser processes; memory is the largest resident
set of it and of its parsers, summed. Searches are those of agents: one to three words of a subject or a text, some with
dates, oldest or newest first, and listing by sender or period without words. Elapsed and processor time differ on a
busy machine.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import Row, main

from kestrl_email.mailbox.corpus import vocabulary, write_archive
from kestrl_email.mailbox.database import inboxes, open_database, rows_digest
from kestrl_email.mailbox.tools import ReadEmail, SearchEmails

MAILS = int(os.environ.get("KESTRL_MAILS", "500000"))
PEOPLE = 150
SEARCHES = 2000
LIMITS = {"build": 480.0, "memory": 500.0, "p50": 5.0, "p99": 50.0}


def resident(pid: int) -> int:
    """Resident bytes of a process and its children."""
    total = 0
    for process in [pid, *children(pid)]:
        try:
            fields = Path(f"/proc/{process}/statm").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += int(fields[1]) * resource.getpagesize() if fields else 0
    return total


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def build(archive: Path, out: Path) -> tuple[float, float, float]:
    """Seconds, processor seconds and the largest MB of one build."""
    command = [sys.executable, "-m", "kestrl._app.cli.main", "email", "build-db"]
    command += ["--source", str(archive), "--out", str(out), "--workers", "2"]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    largest = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            largest = max(largest, resident(process.pid))
            time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"the build ended with {process.returncode}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, used, largest / 1e6


COMMON = frozenset(vocabulary()[0][:200])
"""Words of the filler text that stand for stop words, which nobody searches for."""


def query(rng: random.Random, row: Any) -> dict[str, Any]:
    """Arguments of one search, as an agent makes them: words of a mail's subject, its last line, or rarer ones of its
    text, or without words a sender or a period.
    """
    rare = [word for word in row["body"].split() if word not in COMMON]
    words = [*row["subject"].split(), *row["body"].splitlines()[-1].split()[1:5], *rng.sample(rare, min(3, len(rare)))]
    chosen: dict[str, Any] = {"keywords": rng.sample(words, rng.choice((1, 1, 2, 2, 3)))}
    match rng.randrange(8):
        case 0:
            return {"from_addr": row["from_address"]}
        case 1:
            return {"sent_after": "2000-03-01", "sent_before": "2000-03-15", "oldest_first": True}
        case 2:
            return chosen | {"sent_after": "2000-03-01", "sent_before": "2001-03-01"}
        case 3:
            return chosen | {"oldest_first": True}
        case _:
            return chosen


def searches(database: Path) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each search in the five largest inboxes and five others: elapsed, of the processor, and elapsed
    of those for a word that every mail has.
    """
    rng = random.Random(1)
    with closing(open_database(database)) as connection:
        listed = [address for address, _ in inboxes(connection)]
        columns = "SELECT subject, body, from_address FROM emails WHERE id % 997 = 0 AND from_address <> '' LIMIT 500"
        rows = connection.execute(columns).fetchall()
    elapsed: list[float] = []
    used: list[float] = []
    common: list[float] = []
    for address in [*listed[:5], *rng.sample(listed, 5)]:
        with closing(SearchEmails(database=str(database), inbox=address)) as search:
            for number in range(SEARCHES // 10):
                arguments = query(rng, rng.choice(rows))
                began, processor = time.perf_counter(), time.process_time()
                search(**arguments)
                elapsed.append((time.perf_counter() - began) * 1000)
                used.append((time.process_time() - processor) * 1000)
                if number % 20 == 0:
                    began = time.perf_counter()
                    search(["dollars"])
                    common.append((time.perf_counter() - began) * 1000)
    return sorted(elapsed), sorted(used), sorted(common)


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def measure() -> Iterable[Row]:
    with TemporaryDirectory(dir=os.environ.get("KESTRL_FOLDER")) as folder:
        archive, out = Path(folder) / "corpus.tar.gz", Path(folder) / "mail.db"
        files = write_archive(archive, MAILS, seed=1, people=PEOPLE)
        yield Row(name="mails", value=MAILS, unit="mails")
        yield Row(name="files in the archive", value=files, unit="files")
        yield Row(name="archive", value=archive.stat().st_size / 1e6, unit="MB")
        seconds, used, memory = build(archive, out)
        yield Row(name="build", value=seconds, unit="s", reference=LIMITS["build"], against="the limit")
        yield Row(name="build, processor time of all processes", value=used, unit="s")
        yield Row(name="build, memory of all processes", value=memory, unit="MB", reference=500.0, against="the limit")
        yield Row(name="database", value=out.stat().st_size / 1e6, unit="MB")
        before = rows_digest(out)
        again = timed(lambda: build(archive, out))
        if rows_digest(out) != before:
            raise SystemExit("a second build changed rows")
        yield Row(name="a second build, which changes nothing", value=again, unit="s")
        elapsed, used_by_search, common = searches(out)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            limit = {"reference": LIMITS[name], "against": "the limit"}
            for kind, times in (("", elapsed), (", processor time", used_by_search)):
                yield Row(name=f"search, {name}{kind}", value=times[int(len(times) * share)], unit="ms", **limit)
        yield Row(name="search for a word of every mail, p50", value=statistics.median(common), unit="ms")
        yield Row(name="read", value=reads(out), unit="ms")


def reads(database: Path) -> float:
    """Mean milliseconds of reading a mail."""
    with closing(open_database(database)) as connection:
        query = "SELECT message_id, from_address FROM emails WHERE id % 997 = 0 AND from_address <> '' LIMIT 200"
        chosen = [tuple(row) for row in connection.execute(query)]
    began = time.perf_counter()
    for message_id, address in chosen:
        with closing(ReadEmail(database=str(database), inbox=address)) as read:
            read(message_id)
    return (time.perf_counter() - began) / len(chosen) * 1000


if __name__ == "__main__":
    main(__doc__, measure)
