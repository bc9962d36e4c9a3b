"""Commands that this application adds to `kestrl`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kestrl_email import mail_commands

demo_model = typer.Typer(no_args_is_help=True, help="The tiny demo model.")
email = typer.Typer(no_args_is_help=True, help="E-mail search: real mail and the synthetic data.")


@demo_model.callback()
def _demo_model() -> None:
    """Makes `build` a sub-command although it is the only one."""


@demo_model.command()
def build(
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    steps: Annotated[int | None, typer.Option(help="Number of steps (default: the recipe's).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (default: the recipe's).")] = None,
) -> None:
    """Rebuild the shipped checkpoint: random initialisation, then supervised warm-up."""
    from kestrl_email.demo_model import Recipe
    from kestrl_email.demo_model import build as make

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = Recipe()
    recipe = replace(recipe, steps=steps or recipe.steps, seed=recipe.seed if seed is None else seed)
    make(out, recipe)


mail_commands.register(email)


@email.command()
def data(
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    train: Annotated[int, typer.Option(help="Number of training questions.")] = 4000,
    validation: Annotated[int, typer.Option(help="Number of validation questions.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of the world.")] = 42,
) -> None:
    """Write questions and mailboxes to files, for inspection or for training elsewhere."""
    from kestrl_email.data import provide

    out.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", train), ("validation", validation)):
        typer.echo(provide(name, size, seed, out))
