"""Commands of `kestrl email` for real mail."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sqlite3
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kestrl.errors import UserInputError
from kestrl_email.guide_settings import Command, options
from kestrl_email.mailbox.kind import Kind

if TYPE_CHECKING:
    from kestrl_email.mailbox.questions import Question

console = Console(stderr=True)
Database = Annotated[Path, typer.Argument(help="Database of `kestrl email build-db`.", show_default=False)]


def build_db(
    source: Annotated[
        list[Path],
        typer.Option("--source", help="Maildir, its .tar.gz, mbox, Kaggle CSV, Parquet or JSONL; repeatable."),
    ],
    out: Annotated[Path, typer.Option("--out", help="SQLite file, new or to be continued.")],
    kind: Annotated[Kind | None, typer.Option("--format", help="Format of the sources (default: by name).")] = None,
    owner: Annotated[str, typer.Option(help="Address whose inbox gets every mail of these sources.")] = "",
    max_body: Annotated[int | None, typer.Option(min=1, help="Leave out longer bodies (ART-E: 5000).")] = None,
    max_recipients: Annotated[
        int | None, typer.Option(min=0, help="Leave out mails with more recipients (ART-E: 30).")
    ] = None,
    fold_days: Annotated[
        bool, typer.Option("--fold-days", help="Fold equal texts of different days too, as ART-E does.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Parser processes (default: cores, at most 4).")] = None,
) -> None:
    """Read mail into a searchable database. An interrupted build is continued; a second one changes nothing."""
    from kestrl_email.mailbox.build import build_database
    from kestrl_email.mailbox.database import Filters, Outcome

    if owner and "@" not in owner:
        raise UserInputError(f"--owner: {owner!r} is not an address")
    result = build_database(
        source,
        out,
        filters=Filters(max_body=max_body, max_recipients=max_recipients, fold_days=fold_days),
        console=console,
        kind=kind,
        owner=owner.lower(),
        workers=workers or min(4, os.cpu_count() or 1),
    )
    added, total = result.added, result.total
    typer.echo(f"read {added.total()} new records: {_counted(added)}")
    typer.echo(f"{out}: {_counted(total)}")
    if total.get(Outcome.MALFORMED) and not added[Outcome.MALFORMED]:
        for path, place, note in result.malformed:
            console.print(f"malformed: {path}: {place}: {note}", markup=False, soft_wrap=True)


def _counted(counts: dict[str, int]) -> str:
    from kestrl_email.mailbox.database import Outcome

    names = {Outcome.MAIL: "mails", Outcome.DUPLICATE: "duplicates"}
    shown = [f"{counts.get(outcome, 0)} {names.get(outcome, outcome.value)}" for outcome in Outcome]
    return ", ".join(item for item in shown if not item.startswith("0 ")) or "nothing"


def show_inboxes(
    database: Database,
    limit: Annotated[int, typer.Option(min=1, help="Number of addresses.")] = 20,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the addresses with the largest inboxes."""
    from kestrl_email.mailbox.database import inboxes, open_database

    with closing(open_database(database)) as connection:
        listed = inboxes(connection)[:limit]
    if print_json:
        typer.echo(json.dumps([{"inbox": address, "mails": mails} for address, mails in listed], indent=2))
        return
    for address, mails in listed:
        typer.echo(f"{mails:8}  {address}")


def questions(
    database: Database,
    out: Annotated[Path, typer.Option("--out", help="JSONL file; NAME.validation.jsonl is written beside it.")],
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Questions about headers, made without a model: who, when, how many.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model that writes the questions.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(envvar="OPENAI_BASE_URL", help="OpenAI-compatible endpoint (default: OpenAI's).")
    ] = None,
    key_variable: Annotated[
        str, typer.Option("--api-key-env", help="Environment variable with the endpoint's key.")
    ] = "OPENAI_API_KEY",
    import_: Annotated[
        Path | None, typer.Option("--import", help="Questions in ART-E's format (JSONL or Parquet), not split.")
    ] = None,
    inboxes: Annotated[int, typer.Option(min=1, help="Inboxes to ask about, the largest first.")] = 28,
    per_inbox: Annotated[int, typer.Option(min=1, help="Questions about an inbox at most.")] = 200,
    per_batch: Annotated[int, typer.Option(min=1, max=20, help="Questions that a model writes about 20 mails.")] = 5,
    validation_share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of inboxes for validation.")] = 0.25,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at a time.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of order, dates and sampling.")] = 42,
    database_uri: Annotated[
        str | None,
        typer.Option(
            "--database-uri",
            metavar="s3://BUCKET/PATH",
            help="Address that the database will have: rows name it by that and its digest, for any machine.",
        ),
    ] = None,
) -> None:
    """Write questions about the inboxes of a database, split by inbox into training and validation."""
    from kestrl_email.mailbox import questions as about
    from kestrl_email.mailbox.database import open_database

    if sum((scripted, model is not None, import_ is not None)) != 1:
        raise UserInputError("name one source of questions: --scripted, --model NAME or --import FILE")
    named = str(database.resolve()) if database_uri is None else _pinned(database, database_uri)
    with ExitStack() as stack:
        connection = stack.enter_context(closing(open_database(database)))
        if import_ is not None:
            read = list(about.imported(connection, import_))
            kept = [question for question in read if question is not None]
            typer.echo(f"{out}: {about.write_questions(out, kept, named)} questions")
            if len(kept) < len(read):
                lost = f"left out {len(read) - len(kept)} questions whose mails are not in {database}"
                console.print(lost, markup=False, soft_wrap=True)
            return
        write: Callable[[str], Iterable[Question]] = (
            partial(about.scripted, connection, limit=per_inbox, seed=seed)
            if model is None
            else stack.enter_context(
                _written_by(model, endpoint, key_variable, connection, out, per_inbox, per_batch, concurrency, seed)
            )
        )
        splits = about.split_inboxes(about.people(connection, inboxes), validation_share)
        for path, chosen in zip((out, out.with_suffix(".validation.jsonl")), splits, strict=True):
            if chosen:
                asked = [question for inbox in chosen for question in write(inbox)]
                random.Random(seed).shuffle(asked)  # noqa: S311 - seeded on purpose
                count = about.write_questions(path, asked, named)
                typer.echo(f"{path}: {count} questions about {len(chosen)} inboxes")


def _pinned(database: Path, uri: str) -> str:
    """The uri of a database with its digest, after what to do with both is printed.

    Raises:
        UserInputError: The uri is none of an object store.
    """
    if not re.fullmatch(r"(s3|gs|az)://[^/#]+/[^#]*[^/#]", uri):
        raise UserInputError(f"--database-uri: {uri!r} is not of the form s3://BUCKET/PATH (or gs://, az://)")
    from kestrl.storage.pinned import digest_of  # loads what `kestrl --help` need not have

    pinned = f"{uri}#sha256={digest_of(database)}"
    size = math.ceil(database.stat().st_size / 2**20)
    typer.echo(f"copy {database} to {uri}, and list it in the manifest:")
    typer.echo(f'  data.files: [{{uri: "{pinned}", size: {size}Mi}}]')
    return pinned


@contextmanager
def _written_by(
    model: str,
    endpoint: str | None,
    key_variable: str,
    connection: sqlite3.Connection,
    out: Path,
    per_inbox: int,
    per_batch: int,
    concurrency: int,
    seed: int,
) -> Generator[Callable[[str], Iterable[Question]]]:
    """A function that has a model write questions about an inbox, while the connection to the model is open."""
    from kestrl_email.mailbox import question_writer as by_model
    from kestrl_email.mailbox.questions import mails_of

    key = os.environ.get(key_variable)
    if not key:
        raise UserInputError(f"--api-key-env: {key_variable} is not set; any text will do for endpoints without a key")
    writer = by_model.QuestionWriter(
        by_model.Endpoint(url=endpoint, model=model, key=key),
        out.with_name(f".{out.name}.answers"),
        per_batch=per_batch,
        seed=seed,
        concurrency=concurrency,
    )

    def write(inbox: str) -> Iterable[Question]:
        limit = min(by_model.MAILS_PER_INBOX, -(-per_inbox // per_batch) * by_model.BATCH)
        mails = mails_of(connection, inbox, limit=limit, shortest=by_model.SHORTEST, longest=by_model.LONGEST)
        written = writer.questions(inbox, mails)[:per_inbox]
        counts = writer.counts
        console.print(
            f"{inbox}: {len(written)} questions; so far {counts.requests} requests ({counts.from_cache} kept), "
            f"{counts.prompt_tokens} + {counts.completion_tokens} tokens, {counts.repaired} repaired, "
            f"{counts.dropped} without evidence",
            soft_wrap=True,
        )
        while counts.problems:
            console.print(counts.problems.pop(), markup=False, soft_wrap=True)
        return written

    with closing(writer):
        yield write
    if refusals := writer.counts.refusals:
        console.print("refused replies and questions, by reason:", soft_wrap=True)
        for reason, count in refusals.most_common():
            console.print(f"  {count} {reason}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"each with the reply: {writer.log}", markup=False, highlight=False, soft_wrap=True)


def sample_maildir(
    out: Annotated[Path, typer.Option("--out", help="Folder to create.")],
    mails: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of mails, before copies.")] = 2000,
    people: Annotated[int, typer.Option(min=2, max=1000, help="Number of people who write them.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed.")] = 42,
) -> None:
    """Write a maildir of invented mail in the format of Enron's, with its copies and defects, for trying out."""
    from kestrl_email.mailbox.corpus import write_maildir

    if out.exists():
        raise UserInputError(f"--out: {out} exists already; name a new folder")
    typer.echo(f"{out}: {write_maildir(out, mails, seed=seed, people=people)} files")


def settings(
    command: Annotated[Command, typer.Option("--for", help="Command that takes the options.")] = Command.RUN,
) -> None:
    """Print the options for the quick-training guide's environment variables: kestrl run FILE $(kestrl email
    settings).
    """
    typer.echo(" ".join(options(os.environ, command)))


def register(app: typer.Typer) -> None:
    app.command("build-db")(build_db)
    app.command("questions")(questions)
    app.command("sample-maildir")(sample_maildir)
    app.command("settings")(settings)
    app.command("inboxes")(show_inboxes)
