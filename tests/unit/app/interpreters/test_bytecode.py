"""Byte-code of environments: compiled once for files that they share."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from kestrl._app.interpreters.bytecode import make_bytecode

PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
SHARED = "package/shared.py"


def environment(folder: Path, **modules: str) -> Path:
    """An environment with an interpreter and modules of one package."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / PACKAGES / "package").mkdir(parents=True)
    for name, text in modules.items():
        (folder / PACKAGES / "package" / f"{name}.py").write_text(text)
    return folder


def bytecode(folder: Path, module: str) -> Path:
    return Path(cache_from_source(str(folder / PACKAGES / module)))


def make(folder: Path, *others: Path) -> None:
    with (folder / "lock").open("w") as lock:
        make_bytecode(folder, others, lock.fileno())


@pytest.fixture
def first(tmp_path: Path) -> Path:
    path = environment(
        tmp_path / "first", shared="def where():\n    return where.__code__.co_filename\n", changed="A = 1\n"
    )
    make(path)
    return path


@pytest.fixture
def second(tmp_path: Path, first: Path) -> Path:
    """An environment with one file of the first, another one of the same name and size, and one more."""
    path = environment(tmp_path / "second", changed="A = 2\n", more="B = 3\n")
    os.link(first / PACKAGES / SHARED, path / PACKAGES / SHARED)
    return path


def test_byte_code_of_a_shared_file_is_a_link_and_the_rest_is_compiled(
    tmp_path: Path, first: Path, second: Path
) -> None:
    make(second, tmp_path / "nothing", first)
    assert bytecode(second, SHARED).samefile(bytecode(first, SHARED))
    assert not bytecode(second, "package/changed.py").samefile(bytecode(first, "package/changed.py"))
    assert bytecode(second, "package/more.py").is_file()


def test_a_module_loaded_from_linked_byte_code_is_that_of_its_environment(first: Path, second: Path) -> None:
    make(second, first)
    program = "from package import shared, changed; print(shared.where(), changed.A)"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(second / PACKAGES)!r}); {program}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(second / PACKAGES / SHARED), "2"]


def test_byte_code_that_is_not_of_the_file_is_compiled_anew_and_stays_elsewhere(first: Path, second: Path) -> None:
    stale = bytecode(first, SHARED)
    other = first / PACKAGES / "package" / "changed.py"
    os.utime(other, (1, 1))
    py_compile.compile(str(other), cfile=str(stale), doraise=True)
    earlier = stale.read_bytes()
    make(second, first)
    assert bytecode(second, SHARED).read_bytes() != earlier
    assert stale.read_bytes() == earlier


def test_another_version_of_python_shares_nothing(first: Path, second: Path) -> None:
    (first / PACKAGES.parents[0]).rename(first / "lib" / "python3.2")
    make(second, first)
    assert bytecode(second, SHARED).stat().st_nlink == 1


def test_a_file_that_does_not_compile_fails_when_it_is_imported_and_not_before(tmp_path: Path) -> None:
    path = environment(tmp_path / "third", old="print 'x'\n", fine="C = 1\n")
    make(path)
    assert bytecode(path, "package/fine.py").is_file()
    assert not bytecode(path, "package/old.py").exists()
