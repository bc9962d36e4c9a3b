"""What the environment of a job gets: the columns of a row at its reset, and our packages in its interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kestrl.episode import Json, Scenario
from kestrl.errors import UserInputError

ANSWER, GROUND_TRUTH = "answer", "ground_truth"
PACKAGES = ("kestrl", "kestrl_tools")


def reset_arguments(scenario: Scenario) -> dict[str, Json]:
    """The columns of a row, as keyword arguments of `reset`: those without a meaning for KestRL, and the prompt and the
    ground truth where there are some.
    """
    columns: dict[str, Any] = dict(scenario.metadata)
    if scenario.messages:
        columns.setdefault("prompt", list(scenario.messages))
    if scenario.ground_truth is not None and ANSWER not in columns:
        columns.setdefault(GROUND_TRUTH, scenario.ground_truth)
    return columns


def link_sources(folder: Path) -> None:
    """Links our packages into a folder, which goes on the path of another interpreter: that of this one may have
    packages for another Python, or in other versions.

    Raises:
        UserInputError: A package has no folder, as in an archive.
    """
    for name in PACKAGES:
        (folder / name).symlink_to(package_folder(name), target_is_directory=True)


def package_folder(name: str) -> Path:
    """Folder of a package of ours, for another interpreter.

    Raises:
        UserInputError: It has none, as in an archive.
    """
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places or not Path(places[0]).is_dir():
        raise UserInputError(f"{name} is not installed as a folder; install it with pip")
    return Path(places[0]).resolve()
