"""The command `kestrl push`: a run sent to an experiment tracker, or as a data set."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kestrl._app.cli.options import DEFAULT_RUNS, Runs
from kestrl._app.episodes.places import EpisodePlace, find_place
from kestrl._app.push.cursor import open_cursor
from kestrl._app.push.follower import Follower, SentParts
from kestrl._app.push.target import PushedRun, Target, TargetRefused, TargetUnavailable
from kestrl._shared.conventions import EXIT_FAILED
from kestrl.errors import StorageError, UserInputError
from kestrl.terminal import safe_line


class To(StrEnum):
    """Kinds of targets."""

    MLFLOW = "mlflow"
    WANDB = "wandb"
    HF = "hf"


def push(
    to: Annotated[To, typer.Option(help="mlflow, wandb, or hf for a folder that the Hub's viewer shows.")],
    run_id: Annotated[
        str | None,
        typer.Argument(help="Run id, folder, or address such as s3://bucket/run (default: the latest run)."),
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            help="mlflow: address of the server, or sqlite:///mlflow.db (default: MLFLOW_TRACKING_URI). wandb: folder "
            "of offline runs (default: wandb). hf: the folder to write.",
            show_default=False,
        ),
    ] = None,
    experiment: Annotated[
        str, typer.Option(help="Experiment of MLflow or project of W&B (default: the job's name).", show_default=False)
    ] = "",
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of groups whose episodes are sent.")] = 1.0,
    secret: Annotated[
        Path | None,
        typer.Option(help="File of NAME=VALUE lines with the target's credentials.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Send a run to MLflow or Weights & Biases, or write its episodes as a data set for the Hub."""
    place = find_place(runs, run_id)
    run = _pushed_run(place)
    variables = {**os.environ, **_secrets(secret)}
    with (
        _target(to, uri, experiment, variables) as target,
        open_cursor(run.storage, f"{target.key} {sample}") as cursor,
    ):
        follower = Follower(place, run, target, cursor, sample=sample, say=_say)
        try:
            delivery = follower.push(follow=follow)
        except (TargetUnavailable, TargetRefused, StorageError) as error:
            raise type(error)(
                f"{error}; {_counted(follower.sent)} before that, and the same command sends the rest", code=error.code
            ) from error
    typer.echo(_counted(delivery))
    if delivery.problems:
        typer.echo(safe_line(f"{len(delivery.problems)} parts were not sent: {delivery.problems[0]}"), err=True)
        raise typer.Exit(EXIT_FAILED)


def _say(line: str) -> None:
    typer.echo(safe_line(line), err=True)


def _counted(delivery: SentParts) -> str:
    return f"sent {delivery.episodes} episodes in {delivery.parts} parts" if delivery.parts else "nothing new to send"


def _secrets(path: Path | None) -> Mapping[str, str]:
    from kestrl._app.local.secrets import read_env

    return {} if path is None else read_env(path, "--secret")


def _pushed_run(place: EpisodePlace) -> PushedRun:
    storage = place.store.uri
    if place.run is None:
        name = storage.rpartition("/")[2] or "run"
        return PushedRun(id=name, job=name, storage=storage, settings={})
    document: Any = json.loads((place.run.path / "job.json").read_bytes())
    return PushedRun(id=place.run.id, job=place.run.job().metadata.name, storage=storage, settings=document["spec"])


@contextmanager
def _target(to: To, uri: str | None, experiment: str, variables: Mapping[str, str]) -> Generator[Target]:
    """A target, which is closed at the end.

    Raises:
        UserInputError: The address does not fit, or a package is missing.
    """
    with _opened(to, uri, experiment, variables) as target:
        try:
            yield target
        finally:
            target.close()


@contextmanager
def _opened(to: To, uri: str | None, experiment: str, variables: Mapping[str, str]) -> Generator[Target]:
    if to is To.MLFLOW:
        with _mlflow(uri or variables.get("MLFLOW_TRACKING_URI"), experiment, variables) as target:
            yield target
    elif to is To.WANDB:
        from kestrl._app.push.wandb.target import WandB

        yield WandB(Path(uri or "wandb").resolve(), experiment, variables)
    else:
        from kestrl._app.push.hub import HubFolder

        if uri is None:
            raise UserInputError("--to hf needs --uri FOLDER, the folder to write")
        yield HubFolder(Path(uri).resolve())


@contextmanager
def _mlflow(uri: str | None, experiment: str, variables: Mapping[str, str]) -> Generator[Target]:
    try:
        from kestrl._app.push.mlflow.connection import MLflowConnection
        from kestrl._app.push.mlflow.server import database_of, serving_mlflow
        from kestrl._app.push.mlflow.target import MLflow
    except ModuleNotFoundError as error:
        raise UserInputError(f"--to mlflow needs the package {error.name}: pip install 'kestrl[push]'") from error
    if uri is None:
        raise UserInputError("--to mlflow needs --uri, or MLFLOW_TRACKING_URI: http://127.0.0.1:5000, for example")
    experiment_name = experiment or variables.get("MLFLOW_EXPERIMENT_NAME", "")
    database = database_of(uri)
    if database is None:
        yield MLflow(MLflowConnection(uri, variables), experiment_name, location=uri)
        return
    with serving_mlflow(database) as address:
        yield MLflow(MLflowConnection(address, {}), experiment_name, location=database)


def register(app: typer.Typer) -> None:
    app.command()(push)
