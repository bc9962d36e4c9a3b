"""MCP servers and other packages of npm and PyPI, installed once for a checkout. Tests that use them are marked with
`INSTALLS`.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.wheels import INSTALL_SECONDS, ROOT, UV

FOLDER = ROOT / ".tools" / "mcp"
EVERYTHING = "@modelcontextprotocol/server-everything@2026.8.31"
FILESYSTEM = "@modelcontextprotocol/server-filesystem@2026.8.31"
TIME = "mcp-server-time==2026.10.19"


def npm_server(requirement: str) -> tuple[str, ...]:
    """The command of a server from npm, such as `@scope/name@1.2.3`; the test is skipped where there is no npm."""
    return ("node", str(npm_package(requirement) / "dist" / "index.js"))


def npm_package(requirement: str) -> Path:
    """The folder of a package from npm, such as `@scope/name@1.2.3`; the test is skipped where there is no npm.

    Raises:
        subprocess.CalledProcessError: It cannot be installed; npm's own words are on standard error.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no npm here")

    def install(folder: Path) -> None:
        options = ("--prefix", folder, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        subprocess.run((npm, "install", *options, requirement), check=True, timeout=INSTALL_SECONDS)

    name = requirement.rpartition("@")[0]
    return _installed(requirement, install) / "node_modules" / name


def pypi_server(requirement: str) -> tuple[str, ...]:
    """The command of a server from PyPI, such as `mcp-server-time==1.2.3`, in an environment of its own.

    Raises:
        subprocess.CalledProcessError: It cannot be installed; uv's own words are on standard error.
    """

    def install(folder: Path) -> None:
        subprocess.run(
            (UV, "venv", "--quiet", "--relocatable", "--python", "3.11", folder), check=True, timeout=INSTALL_SECONDS
        )
        python = folder / "bin" / "python"
        subprocess.run(
            (UV, "pip", "install", "--quiet", "--python", python, requirement), check=True, timeout=INSTALL_SECONDS
        )

    return (str(_installed(requirement, install) / "bin" / requirement.partition("==")[0]),)


def _installed(requirement: str, install: Callable[[Path], None]) -> Path:
    folder = FOLDER / requirement.replace("/", "+")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of pytest-xdist ask at once
        if not folder.exists():
            partial = FOLDER / f"{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            install(partial)
            partial.rename(folder)
    return folder
