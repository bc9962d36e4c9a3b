"""The program `kestrl`, where the packages of its extra `cli` may be missing."""

from __future__ import annotations

import sys

from kestrl._shared.conventions import EXIT_INPUT

PACKAGES = frozenset({"rich", "typer"})
"""Packages of the extra `cli`."""


def kubectl_main() -> None:
    """`kubectl kestrl`: `main` for jobs of the cluster."""
    main(on_cluster=True)


def main(*, on_cluster: bool = False) -> None:
    """Runs a command, or ends with exit code 2 and the package to install."""
    try:
        from kestrl._app.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.stderr.write(f"error: the program kestrl needs the package {error.name}: pip install 'kestrl[cli]'\n")
        sys.exit(EXIT_INPUT)
    run(on_cluster=on_cluster)
