"""The programs of Kubernetes as built by `tests/e2e/kit/build`, and other files of their Go modules."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.go import go, path_with_go

from .commands import run

SOURCES = Path(__file__).parents[1] / "kit"
KUEUE = SOURCES / "kueue"
"""The module of Kueue's manager, and the script that builds it."""
KEDA = SOURCES / "keda"
"""A module that requires KEDA's, for its definitions."""
AGENT_SANDBOX = SOURCES / "agent_sandbox"
"""The module of agent-sandbox's controller, and the script that builds it."""
KEYED = ("go.mod", "go.sum", "build", "kubernetes/main.go", "coredns/main.go")
"""The files that `build` names the folder by, in its order."""
COMPLETE = ".complete"


@dataclass(frozen=True, slots=True)
class Kit:
    """A folder of programs."""

    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def images(self) -> Path:
        """Archives of images for clusters of this kit."""
        return self.folder / "images"


def cache_folder() -> Path:
    """The builder's cache folder, which others may use too."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrl"


def find_kit() -> Kit | None:
    """The kit for the current sources, if it was built."""
    given = os.environ.get("KESTRL_KIT")
    key = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in KEYED)).hexdigest()[:16]
    kit = Kit(Path(given) if given else cache_folder() / "kit" / key)
    return kit if (kit.folder / COMPLETE).exists() else None


def build_kit() -> Kit:
    """The kit, built if necessary: that takes eleven to sixteen minutes, with progress on standard error."""
    return Kit(_built(SOURCES / "build"))


def _built(script: Path) -> Path:
    """The folder that a script of this module prints, once it has built what is missing with Go."""
    environment = {**os.environ, "PATH": path_with_go()}
    printed = subprocess.run([script], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Path(printed.stdout.strip())


def module_folder(module: str, sources: Path = SOURCES) -> Path:
    """The folder of a Go module that a module of ours requires, downloaded if necessary."""
    output = json.loads(run(go(), "-C", sources, "mod", "download", "-json", module, seconds=300))
    return Path(output["Dir"])


def build_kueue() -> Path:
    """Kueue's manager, built if necessary: that takes five minutes after the kit, with progress on standard error."""
    return _built(KUEUE / "build") / "kueue"


def kueue_folder() -> Path:
    """The folder of Kueue's module, with its definitions and manifests."""
    return module_folder("sigs.k8s.io/kueue", KUEUE)


def keda_folder() -> Path:
    """The folder of KEDA's module, with its definitions."""
    return module_folder("github.com/kedacore/keda/v2", KEDA)


def build_agent_sandbox() -> Path:
    """The controller of agent-sandbox, built if necessary, with progress on standard error."""
    return _built(AGENT_SANDBOX / "build") / "agent-sandbox-controller"


def agent_sandbox_folder() -> Path:
    """The folder of agent-sandbox's module, with its definitions."""
    return module_folder("sigs.k8s.io/agent-sandbox", AGENT_SANDBOX)
