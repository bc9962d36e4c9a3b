"""Byte-code of an environment: shared with other environments that have the same files, compiled for the rest.

uv links the files of a wheel from its cache, so that environments on one file system share them. Byte-code is compiled
in each environment, which takes most of an installation's time. That of a shared file is valid in every environment:
it has the time and the size of its source, and the path in it is set when it is loaded. Python replaces files of
byte-code and never writes into one, so that links to it keep theirs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from kestrl._app.interpreters.places import without_python

CACHE = "__pycache__"
PACKAGES = "lib/python*/site-packages"


def make_bytecode(environment: Path, donors: Sequence[Path], handle: int) -> None:
    """Makes the byte-code of an environment.

    Args:
        environment: Its folder.
        donors: Environments that may have the same files.
        handle: Descriptor of a lock that the compiler holds, too.
    """
    for packages in environment.glob(PACKAGES):
        same_version = [donor / packages.relative_to(environment) for donor in donors]
        for folder, _, names in os.walk(packages):
            place = Path(folder).relative_to(packages)
            _link_bytecode(Path(folder), frozenset(names), [donor / place for donor in same_version])
        _compile(environment, packages, handle)


def _link_bytecode(folder: Path, names: frozenset[str], donors: Sequence[Path]) -> None:
    """Links byte-code of the sources in a folder from the same folder of other environments."""
    for donor in donors:
        for bytecode in _bytecode_files(donor):
            source = f"{bytecode.stem.rpartition('.')[0]}.py"
            link = folder / CACHE / bytecode.name
            if source in names and not link.exists() and _is_same(folder / source, donor / source):
                link.parent.mkdir(exist_ok=True)
                _link(bytecode, link)


def _bytecode_files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder / CACHE) as entries:
            yield from [Path(entry.path) for entry in entries if entry.name.endswith(".pyc")]
    except OSError:  # it has no such folder, or is being removed
        return


def _is_same(source: Path, donor: Path) -> bool:
    try:
        return os.path.samestat(source.stat(), donor.stat())
    except OSError:  # removed meanwhile
        return False


def _link(bytecode: Path, link: Path) -> None:
    try:
        os.link(bytecode, link)
    except OSError:  # removed meanwhile, or without further links: it is compiled
        return


def _compile(environment: Path, packages: Path, handle: int) -> None:
    """Compiles what has no valid byte-code. Files in the syntax of other versions fail; they are compiled, and refused,
    when they are imported.
    """
    subprocess.run(  # noqa: S603 - an interpreter that was just made
        [environment / "bin" / "python", "-I", "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", packages],
        env=without_python(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        pass_fds=(handle,),
    )
