"""`python scripts/release.py [--dry-run] [--out FOLDER]`: builds the files of a release, and pushes none.

The folder has the wheel and the sdist of each distribution, the chart as `helm push` takes it, an SBOM of what the
distributions need by the lock (CycloneDX), and SHA256SUMS. A dry run builds the same from a tree that is not ready, and
says what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = ROOT / ".tools" / "bin" / "uv"
CHART = ROOT / "charts" / "kestrl"
KITS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrl" / "kit"
"""Where `make kit` has built helm."""
RELEASED = re.compile(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


class NotReleasable(Exception):
    """A release cannot be made; the message says why."""


def run(*command: str | Path) -> str:
    try:
        done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotReleasable(f"there is no {command[0]}") from error
    if done.returncode != 0:
        raise NotReleasable(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def projects(root: Path) -> list[Path]:
    """The pyproject.toml of every distribution."""
    return [root / "pyproject.toml", *sorted(root.glob("*/pyproject.toml")), *sorted(root.glob("*/*/pyproject.toml"))]


def versions(root: Path) -> dict[str, str]:
    """The version that each file states."""
    stated = {
        str(path.relative_to(root)): str(tomllib.loads(path.read_text())["project"]["version"])
        for path in projects(root)
    }
    chart = (root / "charts" / "kestrl" / "Chart.yaml").read_text()
    for field in ("version", "appVersion"):
        found = re.search(rf"^{field}: \"?([^\"\s]+)", chart, re.MULTILINE)
        stated[f"charts/kestrl/Chart.yaml: {field}"] = found[1] if found else "none"
    for image in re.findall(r"ghcr\.io/kestrl/\S+", (root / "charts" / "kestrl" / "values.yaml").read_text()):
        stated[f"charts/kestrl/values.yaml: {image}"] = image.rpartition(":")[2]
    return stated


def obstacles(root: Path) -> Iterator[str]:
    """Why this tree is not that of a release."""
    stated = versions(root)
    version = stated["pyproject.toml"]
    for place, other in stated.items():
        if other != version:
            yield f"{place} is {other}, and pyproject.toml {version}"
    changelog = (root / "CHANGELOG.md").read_text()
    newest = SECTION.search(changelog)
    released = RELEASED.match(newest[0]) if newest else None
    if released is None:
        yield f"CHANGELOG.md: its newest section, {newest[1] if newest else 'none'!r}, has no date"
    elif released[1] != version:
        yield f"CHANGELOG.md: its newest section is {released[1]}, and pyproject.toml {version}"


def changed_files() -> Iterator[str]:
    """Why the files of the release would not be those of a commit."""
    try:
        changed = run("git", "status", "--porcelain").splitlines()
    except NotReleasable as error:
        yield str(error)
        return
    if changed:
        yield f"{len(changed)} files differ from the commit, such as {changed[0][3:]}"


def find_helm() -> str:
    """A helm: that of KESTRL_HELM, of the PATH, or of `make kit`.

    Raises:
        NotReleasable: There is none.
    """
    built = sorted(KITS.glob("*/helm"), key=lambda path: path.stat().st_mtime)
    helm = os.environ.get("KESTRL_HELM") or shutil.which("helm") or (str(built[-1]) if built else None)
    if helm is None:
        raise NotReleasable("no helm: make kit builds one, or KESTRL_HELM names it")
    return helm


def build_distributions(out: Path) -> None:
    """Wheels and sdists; each wheel is built from its sdist, so that the sdist is known to be complete."""
    run(UV, "build", "--all-packages", "--quiet", "--out-dir", out)


def package_chart(out: Path) -> None:
    """The chart as `helm push` takes it."""
    out.mkdir(parents=True, exist_ok=True)
    run(find_helm(), "package", CHART, "--destination", out)


def build(out: Path) -> None:
    """Every file of a release, and their digests."""
    out.mkdir(parents=True, exist_ok=True)
    left = [path.name for path in out.iterdir()]
    if left:
        raise NotReleasable(f"{out} is not empty: it has {left[0]}; remove it, or name another by --out")
    build_distributions(out)
    (out / ".gitignore").unlink(missing_ok=True)  # uv's, for a folder within a repository
    package_chart(out)
    version = versions(ROOT)["pyproject.toml"]
    lock = ("export", "--frozen", "--all-packages", "--all-extras", "--no-default-groups", "--format", "cyclonedx1.5")
    run(UV, *lock, "--quiet", "--output-file", out / f"kestrl-{version}.cdx.json")
    digests = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(digests))


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty folder (default: dist)")
    parser.add_argument("--dry-run", action="store_true", help="build from a tree that is not ready")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--distributions", action="store_true", help="wheels and sdists only")
    only.add_argument("--chart", action="store_true", help="the chart only")
    arguments = parser.parse_args()
    try:
        if arguments.distributions:
            build_distributions(arguments.out)
            return 0
        if arguments.chart:
            package_chart(arguments.out)
            return 0
        why = [*obstacles(ROOT), *changed_files()]
        for line in why:
            print(f"not ready: {line}", file=sys.stderr)
        if why and not arguments.dry_run:
            return 1
        build(arguments.out)
    except NotReleasable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("".join(f"{path.name}\n" for path in sorted(arguments.out.iterdir())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
