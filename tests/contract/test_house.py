"""The floor plan: rooms without circles, folders that can be read at a glance, and modules that import little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kestrl": "src",
    "kestrl_demo_models": "examples/demo-models/src",
    "kestrl_email": "examples/email-search/src",
    "kestrl_inference": "services/inference/src",
    "kestrl_judge": "services/judge/src",
    "kestrl_learner": "services/learner/src",
    "kestrl_operator": "operator/src",
    "kestrl_rollout": "services/rollout/src",
    "kestrl_sandbox": "services/sandbox/src",
    "kestrl_tools": "services/tools/src",
}
NAMES = 20
"""Largest number of modules and folders that a folder shows; its `__init__.py` is the folder itself."""
FAN_OUT = 20
"""Largest number of our own modules that a module imports, but for those of `WIDE`."""
WIDE: Mapping[str, int] = {
    "kestrl_learner.run_resources": 23,
    "kestrl._app.cli.evaluations": 23,
    "kestrl_operator.controllers.reconcile": 24,
    "kestrl._app.local.runner": 21,
    "kestrl_learner.training": 23,
}
"""Modules that import more, and how many they may: numbers that only fall."""


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def generated(module: str) -> bool:
    return module.startswith("kestrl.api.")


def folders() -> Iterator[Path]:
    for package, source in PACKAGES.items():
        top = ROOT / source / package
        yield top
        yield from (path for path in top.rglob("*") if path.is_dir() and any(path.glob("*.py")))
    yield from (path for path in (ROOT / "tests").rglob("*") if path.is_dir() and any(path.glob("*.py")))


def test_a_folder_shows_at_most_twenty_names() -> None:
    crowded: dict[str, int] = {}
    for folder in folders():
        if "api" in folder.relative_to(ROOT).parts:
            continue
        names = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        names += [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
        if len(names) > NAMES:
            crowded[str(folder.relative_to(ROOT))] = len(names)
    assert crowded == {}


def rooms(package: str) -> dict[str, set[str]]:
    """For each module and folder directly below a package, those that it imports, with all that is in them."""
    children = graph().find_children(package)
    room = {module: child for child in children for module in (child, *graph().find_descendants(child))}
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, child in room.items():
        for imported in graph().find_modules_directly_imported_by(module):
            if room.get(imported, child) != child:
                arrows[child].add(room[imported])
    return arrows


def packages_with_rooms() -> list[str]:
    return sorted(module for module in graph().modules if not generated(module) and graph().find_children(module))


@pytest.mark.parametrize("package", packages_with_rooms())
def test_rooms_have_no_circle(package: str) -> None:
    try:
        TopologicalSorter(rooms(package)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of rooms: {' -> '.join(error.args[1])}")


def test_a_module_imports_few_others() -> None:
    fan_out = {
        module: sum(not generated(other) for other in graph().find_modules_directly_imported_by(module))
        for module in graph().modules
    }
    wide = {module: count for module, count in fan_out.items() if count > FAN_OUT}
    assert wide == WIDE, "a number that has fallen is written down; none rises"
