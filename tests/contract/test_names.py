"""Names say what a thing is: bare participles and pronouns are rare, and a class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "services", "operator")
WORDS = """
    given found made known seen wanted kept said shown each some own left taken asked listed named sent held done
    used read written chosen begun ended due near there here one many others other rest whole inner outer before
    after what why how more most least such single alone again away gone lost missing present later earlier first
    last newest oldest nearest longest shortest largest smallest
"""
"""Words that say when a thing came to be, or that it is another one, and not what it is."""
BARE = frozenset(WORDS.split())
BARE_SHARE = 0.015
"""Largest share of them among the names of locals and parameters."""
SEVERAL_MEANINGS = frozenset({"Agent", "Algorithm", "Conversation", "Limits", "Reply", "Run", "Turn"})
"""Public class names that stand in several files: a field of the manifest and what it sets, or both public."""


def modules() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name and "tests" not in path.parts:
                yield ast.parse(path.read_text())


def bound_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_":
            yield node.id.strip("_")
        elif isinstance(node, ast.arg) and node.arg not in {"self", "cls", "_"}:
            yield node.arg.strip("_")


def test_few_names_are_bare_participles_or_pronouns() -> None:
    names = [name for module in modules() for name in bound_names(module)]
    bare = [name for name in names if name in BARE]
    assert len(bare) <= BARE_SHARE * len(names), f"{len(bare)} of {len(names)}: name things by a noun"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, int] = defaultdict(int)
    for module in modules():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name] += 1
    assert {name for name, count in places.items() if count > 1} <= SEVERAL_MEANINGS
