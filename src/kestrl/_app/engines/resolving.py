"""Resolves the requirements of an engine to a flat lock: one line for each package, with the hashes of its files."""

from __future__ import annotations

import json
import platform
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kestrl._app.engines.builds import ADDED, LEFT_OUT, PACKAGES, REGISTRY_TORCH, REPLACED, Build, Wanted, requirement
from kestrl._app.interpreters.uv import run_uv
from kestrl.errors import UserInputError

TORCH = re.compile(r"^Requires-Dist: torch==(\d+(?:\.\d+)+)", re.MULTILINE)
NUMBER = re.compile(r"^Version: (\S+)", re.MULTILINE)
PYTHONS = re.compile(r"-(?:py2\.py3|py3|py3\d+|cp3(?:11|12|13)|cp3\d+-abi3)-")
"""Tags of Python in the name of a wheel that KestRL's versions of it install; also of the stable interface."""
PYTHON_MARKER = "python_"
OLDEST = "python_full_version >= '3.11' and "
"""Condition that holds for every version of Python that KestRL runs on."""


def overrides(build: Build, metadata: str) -> list[str]:
    """Requirements that replace those of a build's package, by its metadata. Pure.

    Raises:
        UserInputError: It does not say which torch it needs.
    """
    replaced = [f"{name}; sys_platform == 'never'" for name in LEFT_OUT.get(build, ())]
    replaced += REPLACED.get(build, ())
    if build in REGISTRY_TORCH:
        torch = TORCH.search(metadata)
        if torch is None:
            raise UserInputError(f"{PACKAGES[build]} does not say which torch it needs; install another version")
        replaced.append(f"torch=={torch[1]}")
    return replaced


def flat_lock(resolved: Mapping[str, Any], machine: str) -> str:
    """Requirements with the hashes of the files that can be installed on a kind of machine, from a `pylock.toml`.

    Pure.

    Raises:
        UserInputError: A package has no file for it.
    """
    lines: list[str] = []
    for package in resolved["packages"]:
        name, version, marker = package["name"], package.get("version"), package.get("marker", "")
        hashes = sorted(set(_hashes(package, machine)))
        if version is None or not hashes:
            raise UserInputError(f"{name} {version or ''} has no file for Linux on {machine}; use another version")
        marker = marker.removeprefix(OLDEST)
        # Those of the platform hold for every line.
        condition = f" ; {marker}" if PYTHON_MARKER in marker else ""
        lines.append(
            " \\\n    ".join([f"{name}=={version}{condition}", *(f"--hash=sha256:{hash_text}" for hash_text in hashes)])
        )
    return "\n".join([*lines, ""])


def _hashes(package: Mapping[str, Any], machine: str) -> Iterator[str]:
    wheels: Sequence[Mapping[str, Any]] = package.get("wheels", ())
    serving = [wheel for wheel in wheels if _serves(_file_name(wheel), machine)]
    for file in serving or filter(None, [package.get("sdist")]):
        yield file["hashes"]["sha256"]


def _file_name(wheel: Mapping[str, Any]) -> str:
    location = wheel.get("name") or wheel.get("path") or wheel.get("url", "")
    return str(location).rpartition("/")[2]


def _serves(wheel: str, machine: str) -> bool:
    tags = wheel.removesuffix(".whl").rpartition("-")[2]
    linux = "linux" in tags and "musllinux" not in tags and machine in tags
    return (tags == "any" or linux) and PYTHONS.search(wheel) is not None


def resolve(request: Wanted, python: str, options: Sequence[str] = ()) -> tuple[str, str]:
    """Version and lock of an engine, from the registry.

    Args:
        request: The engine.
        python: Interpreter or version of Python that it is for.
        options: Further ones of `uv pip compile`.

    Raises:
        UserInputError: There is no such version, or uv cannot resolve it.
    """
    purpose = f"{request} cannot be resolved"
    with tempfile.TemporaryDirectory(prefix="kestrl-engine-") as scratch:
        folder = Path(scratch)
        packages, needed = folder / "packages", requirement(request)
        fetch = ("pip", "install", "--no-deps", "--python", python, "--target", packages, needed)
        run_uv(*fetch, folder=folder, purpose=purpose)
        pattern = f"{request.package.replace('-', '_')}-*.dist-info/METADATA"
        metadata = next(packages.glob(pattern)).read_text(encoding="utf-8")
        version = NUMBER.search(metadata)
        assert version is not None  # of every distribution
        machine = platform.machine()
        settings = {
            "environments": [f"sys_platform == 'linux' and platform_machine == '{machine}'"],
            "override-dependencies": overrides((request.engine, request.device), metadata),
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]  # also TOML
        (folder / "pyproject.toml").write_text("\n".join(["[tool.uv]", *lines, ""]), encoding="utf-8")
        needs = (f"{request.package}=={version[1]}", *ADDED.get((request.engine, request.device), ()))
        (folder / "requirements.in").write_text("\n".join([*needs, ""]), encoding="utf-8")
        compiled = ("pip", "compile", "requirements.in", "--format", "pylock.toml", "-o", "pylock.toml")
        run_uv(*compiled, "--python", python, *options, folder=folder, purpose=purpose)
        resolved = tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))
        return version[1], flat_lock(resolved, machine)
