"""The files of a release, built by the script behind `make release` from this checkout; nothing is pushed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAKE_HELM = """#!/bin/sh
[ "$1" = package ] && [ "$3" = --destination ] && tar -C "$2/.." -czf "$4/kestrl-0.1.0.tgz" kestrl
"""
PROJECTS = [ROOT / "pyproject.toml", *ROOT.glob("operator/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]
STATED = ("charts/kestrl/Chart.yaml", "charts/kestrl/values.yaml", "CHANGELOG.md")
"""Files that state the version, beside those of the distributions."""


def release(root: Path, *options: str, helm: str = "") -> subprocess.CompletedProcess[str]:
    """What the script of a tree says and does."""
    return subprocess.run(
        [sys.executable, root / "scripts" / "release.py", *options],
        env={**os.environ, "KESTRL_HELM": helm},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def helm(tmp_path: Path) -> str:
    """A helm that packages the chart; the chart's tests have a real one."""
    program = tmp_path / "helm"
    program.write_text(FAKE_HELM)
    program.chmod(0o755)
    return str(program)


def test_a_dry_run_builds_every_file_with_its_digest(tmp_path: Path, helm: str) -> None:
    out = tmp_path / "dist"
    done = release(ROOT, "--dry-run", "--out", str(out), helm=helm)
    assert done.returncode == 0, done.stderr
    names = {tomllib.loads(path.read_text())["project"]["name"].replace("-", "_") for path in PROJECTS}
    assert len(names) > 9
    archives = {f"{name}-0.1.0{kind}" for name in names for kind in ("-py3-none-any.whl", ".tar.gz")}
    listed = {"SHA256SUMS", "kestrl-0.1.0.tgz", "kestrl-0.1.0.cdx.json", *archives}
    assert set(done.stdout.split()) == {path.name for path in out.iterdir()} == listed
    sums = (line.split() for line in (out / "SHA256SUMS").read_text().splitlines())
    digests = {name: digest for digest, name in sums}
    assert digests.keys() == listed - {"SHA256SUMS"}
    assert {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in digests} == digests
    parts = json.loads((out / "kestrl-0.1.0.cdx.json").read_text())
    assert parts["bomFormat"] == "CycloneDX"
    assert {"torch", "kopf", "obstore", "peft"} <= {part["name"] for part in parts["components"]}

    again = release(ROOT, "--dry-run", "--out", str(out), helm=helm)
    assert again.returncode == 1
    assert "is not empty" in again.stderr, "no file of another release is taken for one of this"


def test_the_chart_alone_is_the_archive_that_the_tests_on_kubernetes_install(tmp_path: Path, helm: str) -> None:
    out = tmp_path / "chart"
    done = release(ROOT, "--chart", "--out", str(out), helm=helm)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["kestrl-0.1.0.tgz"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What states the version of this checkout, as a tree that is ready."""
    root = tmp_path / "tree"
    for path in (*PROJECTS, *(ROOT / name for name in STATED), ROOT / "scripts" / "release.py"):
        there = root / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    changelog = root / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 0.1.0 (2026-01-31)\n\n* All.\n")
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "All")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    return root


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("services/judge/pyproject.toml", '"0.1.0"', '"0.2.0"', "services/judge/pyproject.toml is 0.2.0, and"),
        ("charts/kestrl/Chart.yaml", "appVersion: 0.1.0", "appVersion: 0.3.0", "Chart.yaml: appVersion is 0.3.0"),
        ("charts/kestrl/values.yaml", "/judge:0.1.0", "/judge:0.2.0", "ghcr.io/kestrl/judge:0.2.0 is 0.2.0"),
        ("CHANGELOG.md", "(2026-01-31)", "(not released)", "'0.1.0 (not released)', has no date"),
        ("CHANGELOG.md", "0.1.0", "0.2.0", "its newest section is 0.2.0, and pyproject.toml 0.1.0"),
        ("CHANGELOG.md", "All", "Some", "1 files differ from the commit, such as CHANGELOG.md"),
    ],
)
def test_a_tree_that_is_not_ready_is_refused(tree: Path, file: str, old: str, new: str, said: str) -> None:
    path = tree / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refused = release(tree)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert not (tree / "dist").exists()


def test_a_tree_that_is_ready_gets_as_far_as_its_build(tree: Path) -> None:
    stopped = release(tree, "--out", str(tree.parent / "dist"))
    assert "not ready" not in stopped.stderr
    assert ".tools/bin/uv" in stopped.stderr, "the tree has no uv"
