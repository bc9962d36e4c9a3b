"""Making of an environment of Python by uv: beside its path, which it gets when it is complete."""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from pathlib import Path

from kestrl._app.interpreters.bytecode import make_bytecode
from kestrl._app.interpreters.uv import run_uv
from kestrl.errors import UserInputError

REQUIREMENTS = "lock.txt"
"""File of an environment with what was installed in it."""


def make_environment(
    path: Path,
    *,
    python: str,
    requirements: str,
    exact: bool,
    record: tuple[str, str],
    purpose: str,
    handle: int,
) -> None:
    """Makes an environment with compiled bytecode; the caller holds the lock of its name.

    Args:
        path: Its folder.
        python: Interpreter or version of Python.
        requirements: One requirement a line.
        exact: Whether they are all of the packages, each with its hashes.
        record: Name and text of a file that only complete environments have.
        purpose: What fails if uv does.
        handle: Descriptor of the lock, which uv holds too.

    Raises:
        UserInputError: It cannot be made, or something else is at its path.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=f".making-{path.name}-", dir=path.parent))
    try:
        environment = unfinished / "environment"
        venv = ("venv", "--relocatable", "--no-project", "--python", python, environment)
        run_uv(*venv, folder=unfinished, purpose=purpose, keep_open=(handle,))
        (environment / REQUIREMENTS).write_text(requirements, encoding="utf-8")
        install = ("pip", "install", "--python", environment / "bin" / "python", "--no-compile-bytecode")
        options = ("--no-deps", "--require-hashes") if exact else ()
        requirement_options = ("--requirements", environment / REQUIREMENTS)
        run_uv(*install, *options, *requirement_options, folder=unfinished, purpose=purpose, keep_open=(handle,))
        make_bytecode(environment, _donors(path), handle)
        (environment / record[0]).write_text(record[1], encoding="utf-8")
        try:
            environment.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise UserInputError(f"{path} is there and is none of ours; move it away") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _donors(path: Path) -> list[Path]:
    """Environments from which a new one may have its byte-code: our own, and those beside it."""
    siblings = (sibling for sibling in path.parent.iterdir() if not sibling.name.startswith(".") and sibling != path)
    return [Path(sys.prefix), *sorted(siblings)]
