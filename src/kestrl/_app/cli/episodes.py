"""The commands `kestrl episodes`: they read a run's storage, so they also work while it trains and after it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer

from kestrl._app.cli.options import DEFAULT_RUNS, AsJson, Runs
from kestrl._app.episodes.decoding import decoded, tokenizer_of
from kestrl._app.episodes.difference import best_sibling, difference, difference_json
from kestrl._app.episodes.labels import delete_label, labelled, read_labels, with_labels, write_label
from kestrl._app.episodes.places import EpisodePlace, find_episode, find_place
from kestrl._app.episodes.printing import LISTED, episode_lines, judge_lines, listed_line, token_lines
from kestrl._app.episodes.query import EpisodeCondition
from kestrl._app.episodes.reading import Batch, batch_table, batches
from kestrl.episode import Episode, Purpose
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl.terminal import safe

POLL_SECONDS = 1.0
PURPOSES = {"train": Purpose.TRAIN, "eval": Purpose.EVALUATION}
LABELS = ("yes", "no")
episodes = typer.Typer(no_args_is_help=True, help="List, compare and label the episodes of a run.")

RUN_HELP = "Run id, folder of an evaluation, or address such as s3://bucket/run (default: the latest run)."
Run = Annotated[str | None, typer.Argument(help=RUN_HELP, show_default=False)]
RunOption = Annotated[str | None, typer.Option("--run", help=RUN_HELP)]
EpisodeId = Annotated[str, typer.Argument(help="Episode id, as printed by `episodes list`.")]


def _purpose(name: str | None) -> Purpose | None:
    if name is not None and name not in PURPOSES:
        raise UserInputError(f"--purpose: {name!r} is neither train nor eval")
    return None if name is None else PURPOSES[name]


@episodes.command("list")
def list_episodes(
    run_id: Run = None,
    purpose: Annotated[
        str | None, typer.Option(help="train or eval (default: train, or eval of a run that trained nothing).")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only this step, as the live view numbers it.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only attempts at the scenario with this id.")] = None,
    failed: Annotated[
        bool | None, typer.Option("--failed/--not-failed", help="Only episodes that failed, or only others.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="""SQL condition on columns, such as "reward < 0 and failure_boundary = 'tool'"."""),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow further steps until the run ends.")] = False,
    print_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """List stored episodes, one line each, and groups that failed as a whole.

    With --json a line is an object.
    """
    kind, place = _purpose(purpose), find_place(runs, run_id)
    condition = None if where is None else EpisodeCondition(where)
    empty = True
    for batch in _followed(place, kind, step) if follow else batches(place.store, kind, step):
        for row in _rows(place.store, batch, condition):
            if scenario in {None, row["scenario"]} and failed in {None, row["failure_boundary"] is not None}:
                typer.echo(json.dumps(row) if print_json else listed_line(row))
                empty = False
    if empty:
        typer.echo(f"nothing is selected; stored are {_stored_words(place.store)}", err=True)


def _stored_words(store: ObjectStore) -> str:
    """`train 1 to 8, eval 0 to 8`: the stored steps by purpose."""
    stored = {name: ObjectEpisodeStore(store).steps(purpose) for name, purpose in PURPOSES.items()}
    spans = {name: dict.fromkeys((steps[0], steps[-1])) for name, steps in stored.items() if steps}
    return ", ".join(f"{name} {' to '.join(map(str, span))}" for name, span in spans.items()) or "no episodes"


def _followed(place: EpisodePlace, purpose: Purpose | None, step: int | None) -> Iterator[Batch]:
    """The batches that are stored, and those that come until the run ends."""
    seen_batches: set[Batch] = set()
    while True:
        live = place.live  # read before the storage, so that everything written until then is printed
        for batch in batches(place.store, purpose, step):
            if batch not in seen_batches:
                seen_batches.add(batch)
                yield batch
        if not live:
            return
        time.sleep(POLL_SECONDS)


def _rows(store: ObjectStore, batch: Batch, condition: EpisodeCondition | None) -> Sequence[dict[str, Any]]:
    columns = dict.fromkeys([*LISTED, *(() if condition is None else condition.columns())])
    table = with_labels(batch_table(store, batch, [*columns]), read_labels(store))
    rows: list[dict[str, Any]] = (table if condition is None else condition.matching(table)).to_pylist()
    return rows


@episodes.command("show")
def show_episode(
    episode_id: EpisodeId,
    run_id: RunOption = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Also print every token: mask, log-probs, advantage, policy version and text."),
    ] = False,
    prompt: Annotated[
        bool,
        typer.Option("--prompt", help="Also print the prompt and the sampled text of every row, with control tokens."),
    ] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Also print what judge models were sent for its group, and their replies.")
    ] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print an episode: its turns, tool calls and rewards."""
    place = find_place(runs, run_id)
    stored = find_episode(place, episode_id)
    for line in episode_lines(stored):
        typer.echo(line)
    if judge:
        for line in judge_lines(stored.group):
            typer.echo(line)
    if prompt:
        for line in _engine_lines(place, stored.episode):
            typer.echo(line)
    if tokens:
        for line in token_lines(stored.episode, stored.stored.tokens.get(episode_id), _texts(place, stored.episode)):
            typer.echo(line)


def _engine_lines(place: EpisodePlace, episode: Episode) -> Iterator[str]:
    """Every row as text, split into given and sampled parts."""
    parts: list[tuple[int, bool, list[int]]] = []
    for number, row in enumerate(episode.rows):
        start = 0
        for sampled, places in groupby(row.mask):
            end = start + sum(1 for _ in places)
            parts.append((number, bool(sampled), list(row.token_ids[start:end])))
            start = end
    texts = decoded(tokenizer_of(place, "--prompt"), [ids for _, _, ids in parts], "--prompt")
    for (number, sampled, ids), text in zip(parts, texts, strict=True):
        yield f"row {number}, {len(ids)} tokens {'sampled' if sampled else 'given'}:"
        yield safe(text)


def _texts(place: EpisodePlace, episode: Episode) -> Sequence[Sequence[str]] | None:
    """The text of every token by row; None, with a line that says why, if this machine cannot decode them."""
    ids = [[token] for row in episode.rows for token in row.token_ids]
    try:
        texts = iter(decoded(tokenizer_of(place, "the text of tokens"), ids, "the text of tokens"))
    except UserInputError as error:
        typer.echo(safe(f"tokens are shown without text: {error}"), err=True)
        return None
    return [[next(texts) for _ in row.token_ids] for row in episode.rows]


@episodes.command("diff")
def diff_episodes(
    episode_id: EpisodeId,
    other_id: Annotated[
        str | None,
        typer.Argument(help="Another episode (default: the best one of the same group).", show_default=False),
    ] = None,
    run_id: RunOption = None,
    print_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare two episodes: rewards and outcome side by side, and the messages from their first difference on."""
    place = find_place(runs, run_id)
    stored = find_episode(place, episode_id)
    if other_id is None:
        other = best_sibling(stored.episode, stored.group.episodes)
        if other is None:
            raise UserInputError(f"no other episode of the group {stored.group.id} has a reward; name one")
    else:
        other = find_episode(place, other_id).episode
    if print_json:
        typer.echo(json.dumps(difference_json(stored.episode, other), indent=2, ensure_ascii=False))
        return
    for line in difference(stored.episode, other):
        typer.echo(line)


@episodes.command("label")
def label_episode(
    episode_id: EpisodeId,
    label: Annotated[str, typer.Argument(help="yes, no, or none to remove the label.")],
    note: Annotated[str, typer.Option(help="Why, for people.")] = "",
    run_id: RunOption = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Label an episode as good or not. Labels are files of their own, and the column `label` of `list --where`."""
    if label not in {*LABELS, "none"}:
        raise UserInputError(f"label: {label!r} is not yes, no or none")
    place = find_place(runs, run_id)
    find_episode(place, episode_id)
    if label == "none":
        delete_label(place.store, episode_id)
    else:
        write_label(place.store, labelled(episode_id, label, note))


def register(app: typer.Typer) -> None:
    app.add_typer(episodes, name="episodes")
