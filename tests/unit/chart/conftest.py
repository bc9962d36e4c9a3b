"""The chart as Helm itself renders it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "kestrl"
PROMETHEUS = ("--api-versions", "monitoring.coreos.com/v1")
Render = Callable[..., "Rendered"]


class Rendered(list[dict[str, Any]]):
    """Objects, to be asked for by kind and name."""

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return {item["metadata"]["name"]: item for item in self if item["kind"] == kind}

    def one(self, kind: str) -> dict[str, Any]:
        (item,) = self.of(kind).values()
        return item


class Helm:
    """Helm, and the chart."""

    def __init__(self, program: str) -> None:
        self.program = program

    def run(self, *arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Helm with these values over the chart's."""
        return subprocess.run(
            [self.program, *arguments, "--values", "-"],
            input=yaml.safe_dump(values or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    def render(self, values: dict[str, Any] | None = None, *flags: str) -> Rendered:
        """What an install of the release `kestrl` in `kestrl-system` would make."""
        ended = self.run("template", "kestrl", str(CHART), "--namespace", "kestrl-system", *flags, values=values)
        assert ended.returncode == 0, ended.stderr
        return Rendered(item for item in yaml.safe_load_all(ended.stdout) if item)

    def refusal(self, values: dict[str, Any]) -> str:
        """What it says when it refuses these values."""
        ended = self.run("template", "kestrl", str(CHART), "--namespace", "kestrl-system", values=values)
        assert ended.returncode != 0, "these values were taken"
        return ended.stderr


def find_helm() -> str | None:
    named = os.environ.get("KESTRL_HELM")
    if named:
        assert Path(named).is_file(), f"KESTRL_HELM={named} is not there"
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = max((cache / "kestrl" / "kit").glob("*/.complete"), key=lambda mark: mark.stat().st_mtime, default=None)
    return shutil.which("helm") or (None if built is None else str(built.with_name("helm")))


@pytest.fixture(scope="session")
def helm() -> Helm:
    program = find_helm()
    if program is None:
        pytest.skip("no helm: set KESTRL_HELM, or build it with tests/e2e/kit/build")
    return Helm(program)
