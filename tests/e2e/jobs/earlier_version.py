"""An earlier commit of this repository as a version of KestRL: its files, its environment from its own lock file, and
images in which its components run."""

from __future__ import annotations

import copy
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import run
from tests.e2e.cluster.images import ENGINE, KESTRL
from tests.e2e.cluster.kit import cache_folder
from tests.e2e.cluster.up import import_images

ROOT = Path(__file__).parents[3]
SETUP_SECONDS = 1200.0
"""For an environment with torch and an engine, downloaded if they are in no cache."""
COMPLETE = ".complete"
DEVICES = ("cpu", "cuda", "npu")
KEPT = "kept"
"""Tag of this checkout's images while those of the other version are imported under their names."""
DESCRIBE = """
import json, sys
from pathlib import Path
from tests.e2e.cluster.kit import Kit
from tests.e2e.cluster.layout import Layout
from tests.e2e.cluster.objects import mounted
from tests.e2e.cluster.up import _archives
layout = Layout(name="earlier", net=0)
print(json.dumps({"archives": _archives(layout, Kit(Path(sys.argv[1]))), "folders": mounted(layout)}, default=str))
"""
"""Has a commit's own harness write the archives of its images; prints their paths, and the folders that its pods
see."""


@dataclass(frozen=True, slots=True)
class EarlierVersion:
    """A commit's chart and images, on this machine."""

    commit: str
    checkout: Path
    archives: list[Path]
    folders: list[Path]
    """Folders of this machine that its pods have mounted."""

    @property
    def chart(self) -> Path:
        return self.checkout / "charts" / "kestrl"

    @property
    def image(self) -> str:
        """The image in which its components run."""
        return _tagged(KESTRL, self.commit)

    @property
    def engine_image(self) -> str:
        return _tagged(self._names[-1], self.commit)

    @property
    def _names(self) -> list[str]:
        """Names of images in its archives. Its engines may run in the image of all components."""
        has_engine_image = any(path.name.startswith("engine") for path in self.archives)
        return [KESTRL, ENGINE] if has_engine_image else [KESTRL]

    def values(self, chart_values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the chart with its images in place of this checkout's."""
        changed = copy.deepcopy(dict(chart_values))
        changed["operator"]["image"] = self.image
        changed["jobs"]["images"] |= {
            "engine": dict.fromkeys(DEVICES, self.engine_image),
            "learner": dict.fromkeys(DEVICES, self.image),
            **dict.fromkeys(("agent", "rollout", "tools", "judge"), self.image),
        }
        return changed

    def put_on(self, cluster: Cluster) -> None:
        """Gives the node its images under their own tags, and pods its folders."""
        layout, kit = cluster.node.layout, cluster.node.state.kit
        ctr = (kit.program("ctr"), "--address", str(layout.containerd_socket), "--namespace", "k8s.io", "images")
        for name in self._names:
            run(*ctr, "tag", "--force", name, _tagged(name, KEPT))
        import_images(layout, kit, self.archives)
        for name in self._names:
            run(*ctr, "tag", "--force", name, _tagged(name, self.commit))
            run(*ctr, "tag", "--force", _tagged(name, KEPT), name)
        cluster.mount(self.folders)


def _tagged(name: str, tag: str) -> str:
    return f"{name.partition(':')[0]}:{tag}"


def is_in_history(commit: str) -> bool:
    """Whether the repository here has a commit; a shallow clone may not."""
    command = ("git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}")
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def earlier_version(commit: str) -> EarlierVersion:
    """The version of a commit, built in the cache folder unless it is there: that takes about two minutes."""
    checkout = cache_folder() / "earlier" / commit
    checkout.mkdir(parents=True, exist_ok=True)
    with checkout.with_suffix(".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not (checkout / COMPLETE).exists():
            shutil.rmtree(checkout)
            content = subprocess.run(
                ("git", "-C", str(ROOT), "archive", commit), check=True, capture_output=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                archive.extractall(checkout, filter="data")
            run("make", f"--directory={checkout}", "setup", seconds=SETUP_SECONDS)
            (checkout / COMPLETE).touch()
        printed = run(
            *("env", f"--chdir={checkout}", f"{checkout}/.venv/bin/python", "-c", DESCRIBE, str(checkout / "kit"))
        )
    described = json.loads(printed)
    return EarlierVersion(
        commit, checkout, *([Path(path) for path in described[key]] for key in ("archives", "folders"))
    )
