"""What the interpreter of an environment imports of ours: linked packages, beside which nothing else is importable."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kestrl.errors import UserInputError

PACKAGES = ("kestrl", "kestrl_tools")


def link_sources(folder: Path) -> None:
    """Links our packages into a folder, which goes on the path of another interpreter: that of this one may have
    packages for another Python, or in other versions.

    Raises:
        UserInputError: A package has no folder, as in an archive.
    """
    for name in PACKAGES:
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places or not Path(places[0]).is_dir():
            raise UserInputError(f"spec.environment: {name} is not installed as a folder; install it with pip")
        (folder / name).symlink_to(Path(places[0]).resolve(), target_is_directory=True)
