"""The commands of `kestrl`: their names and summaries, and their modules, which are imported when a command is used."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from kestrl.errors import UserInputError

if TYPE_CHECKING:  # typer has click within itself and offers these types nowhere else
    from typer._click.core import Command, Context

COMMANDS_GROUP = "kestrl.commands"
"""Entry points `name -> typer.Typer`: commands that an installed application adds."""

EXTRAS = {"demo-model": "email", "email": "email", "sandbox": "local"}
"""Extras of kestrl that bring a command of another distribution."""

ON_CLUSTER = ("status", "logs", "episodes", "ui", "export", "suspend", "resume")
"""Commands for jobs of a cluster."""


class Listed(NamedTuple):
    """A command as `kestrl --help` lists it."""

    module: str
    """Module below `kestrl._app.cli` whose `register` adds it."""
    summary: str


COMMANDS = {
    "new": Listed(
        "starters",
        "Write a job of your own to begin with: manifest, code, ten rows, tests and a README that says what to type.",
    ),
    "run": Listed(
        "jobs",
        "Train on this machine: start every component of the job and wait for the result. Resumes an unfinished run.",
    ),
    "validate": Listed(
        "jobs",
        "Check a manifest, the code and files that it references, and its data. Exit code 2 if there is a problem.",
    ),
    "plan": Listed("jobs", "Print the components that a job consists of. Starts nothing and writes nothing."),
    "doctor": Listed(
        "jobs",
        "Check whether this machine can run a job and report what is missing. Exit code 2 if anything is.",
    ),
    "env": Listed("environments", "Check a job's environment, tools and rewards without a model, before training."),
    "engine": Listed("engines", "Install inference engines, each in an environment of its own."),
    "schema": Listed("jobs", "Print the JSON Schema of a manifest."),
    "version": Listed("jobs", "Print the version."),
    "status": Listed("runs", "Show the state of a run: progress, components, failures, and the next command."),
    "logs": Listed("runs", "Print the logs of a run's components."),
    "stop": Listed("runs", "Stop a run after its current step and a checkpoint. It can be resumed."),
    "scale": Listed(
        "runs",
        "Change the number of engines of a run that goes on. New ones join, and those that leave finish their turns.",
    ),
    "eval": Listed(
        "evaluations",
        "Evaluate policies of a run on the validation data, greedily or by several samples, side by side.",
    ),
    "compare": Listed(
        "compare",
        "Compare two stored evaluations: means, a paired test over the questions, and the questions that flipped.",
    ),
    "bench": Listed(
        "evaluations",
        "Compare policies of a run with models behind an OpenAI-compatible endpoint, on a manifest's validation data.",
    ),
    "export": Listed(
        "adapters",
        "Export an adapter of a run with every digest verified, or the merged model with --merge. Of a "
        "run of `kestrl sft` that trained all parameters, export the model.",
    ),
    "serve": Listed(
        "serve",
        "Serve a policy of a run behind an OpenAI-compatible endpoint, with the engine of its job. Ctrl-C ends it.",
    ),
    "rejudge": Listed(
        "judges",
        "Score a stored step again with a judge model, without rollouts, and show the differences.",
    ),
    "sft": Listed(
        "sft",
        "Fine-tune an adapter or a model on conversations, and print its address at the end. Resumes a "
        "run that was stopped.",
    ),
    "verify": Listed(
        "verify",
        "Run a job for every seed, and judge it by a published number. Exit code 0 if it is reached, 1 if it is not.",
    ),
    "ui": Listed("page", "Show runs, steps and episodes in a browser: why an episode failed, beside one that did not."),
    "push": Listed(
        "push", "Send a run to MLflow or Weights & Biases, or write its episodes as a data set for the Hub."
    ),
    "episodes": Listed("episodes", "List, compare and label the episodes of a run."),
    "judge": Listed("judges", "Check judge models."),
    "data": Listed("data", "Write data sets as JSONL or Parquet."),
}


class Commands(TyperGroup):
    """The commands, each imported when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        summaries = {name: command.summary for name, command in COMMANDS.items()}
        summaries |= dict.fromkeys(sorted(_applications()), "")
        self.commands = {name: TyperCommand(name, help=summary) for name, summary in summaries.items()}

    def list_commands(self, ctx: Context) -> list[str]:
        """Names for help; of `kubectl kestrl` those for jobs of a cluster."""
        return list(ON_CLUSTER) if is_on_cluster(ctx) else super().list_commands(ctx)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """What help lists: the command without its options, but for those of applications."""
        if is_on_cluster(ctx):
            return of_cluster(cmd_name)
        return super().get_command(ctx, cmd_name) if cmd_name in COMMANDS else loaded(cmd_name)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        if args and args[0] in EXTRAS and args[0] not in _applications():
            raise UserInputError(f"kestrl {args[0]} is not installed; pip install 'kestrl[{EXTRAS[args[0]]}]'")
        if args and is_on_cluster(ctx):
            if args[0] not in ON_CLUSTER:
                raise UserInputError(f"{args[0]}: jobs of a cluster have the commands {', '.join(ON_CLUSTER)}")
            return args[0], of_cluster(args[0]), args[1:]
        if args and args[0] in ON_CLUSTER and args[0] not in COMMANDS:
            raise UserInputError(f"{args[0]} is for jobs of a cluster: kestrl -n NAMESPACE {args[0]} JOB")
        name, command, remaining = super().resolve_command(ctx, args)
        return name, command if name is None else loaded(name), remaining


def is_on_cluster(context: Context) -> bool:
    """Whether a command is for jobs of a cluster: of `kubectl kestrl`, or with a namespace or context."""
    return bool(context.obj or context.params.get("_namespace") or context.params.get("_context"))


def of_cluster(name: str) -> Command:
    """A command for jobs of a cluster, with its options."""
    app = import_module("kestrl._app.cluster.commands").cluster
    return typer.main.get_group(app).commands[name]


def loaded(name: str) -> Command | None:
    """A command with its options; None if there is none of this name."""
    app = typer.Typer()
    if name in COMMANDS:
        import_module(f"kestrl._app.cli.{COMMANDS[name].module}").register(app)
    elif (application := _applications().get(name)) is not None:
        app.add_typer(application.load(), name=name)
    else:
        return None
    return typer.main.get_group(app).commands[name]


def _applications() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}
