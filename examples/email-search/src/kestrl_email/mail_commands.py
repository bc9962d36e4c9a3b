"""Commands of `kestrl email` for real mail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kestrl.errors import UserInputError
from kestrl_email.mailbox.sources import Kind

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
) -> None:
    """List the addresses with the largest inboxes."""
    from contextlib import closing

    from kestrl_email.mailbox.database import inboxes, open_database

    with closing(open_database(database)) as connection:
        for address, mails in inboxes(connection)[:limit]:
            typer.echo(f"{mails:8}  {address}")


def register(app: typer.Typer) -> None:
    app.command("build-db")(build_db)
    app.command("inboxes")(show_inboxes)
