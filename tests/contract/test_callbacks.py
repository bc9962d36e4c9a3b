"""A function that an object calls comes from its constructor, or is added by a method: nobody else assigns it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "operator/src", "services", "examples")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            if "api" not in path.parts and ".venv" not in path.parts:
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def callbacks(tree: ast.Module) -> Iterator[str]:
    """Names of attributes that are declared as functions, such as `self.name: Callable[[], None]`."""
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                if ast.unparse(annotation).startswith("Callable["):
                    yield name
            case _:
                pass


def assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of attributes that are assigned from outside of their object."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and not _of_itself(part):
                    yield node.lineno, part.attr


def _of_itself(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}


def assigned_from_outside(sources: dict[Path, ast.Module]) -> list[str]:
    names = {name for tree in sources.values() for name in callbacks(tree)}
    return [
        f"{path}:{line}: {name}" for path, tree in sources.items() for line, name in assignments(tree) if name in names
    ]


def test_no_object_sets_a_callback_of_another() -> None:
    assert assigned_from_outside(dict(trees())) == []


def test_a_callback_that_another_object_sets_is_seen() -> None:
    sources = {
        Path("engines.py"): ast.parse("class Engines:\n def __init__(self):\n  self.on_change: Callable[[], None] = f"),
        Path("dispatcher.py"): ast.parse("self._engines.on_change = self._workers.on_change = self._wake.set"),
    }
    assert assigned_from_outside(sources) == ["dispatcher.py:1: on_change", "dispatcher.py:1: on_change"]
