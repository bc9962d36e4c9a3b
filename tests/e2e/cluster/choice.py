"""The choice of a cluster for tests: one that the user names, else one that is brought up here, else none, with the
reason.

`E2E_KUBECONFIG` names an existing cluster; the default context is never used by accident. `E2E_CAPABILITIES` lists what
that cluster offers beyond the API (such as `node,network_policies`), `E2E_IMAGE` the image that its nodes can run, and
`E2E_ENGINE_IMAGE` that of engines.
`KESTRL_E2E_IMAGES` names an archive of `tests/e2e/kit/images`, whose images the harness's own node then runs where
possible. `KESTRL_E2E_KEEP=1` uses this checkout's running cluster, brings it up if there is none, and leaves it
running.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .capabilities import ANYWHERE, OWN, Capability
from .client import Cluster
from .images import BUILT, ENGINE, KESTRL, built_names
from .kit import Kit, cache_folder, find_kit
from .layout import default_name
from .node import Node
from .up import bring_up, find, import_images, missing

BRIDGED = Path("/proc/sys/net/bridge")
"""Exists if the kernel filters packets on a bridge, which services and policies need."""


class Unavailable(Exception):
    """No cluster is available; the message says why."""


def foreign() -> Cluster | None:
    """The cluster that the user names.

    Raises:
        Unavailable: It cannot be reached.
    """
    kubeconfig = os.environ.get("E2E_KUBECONFIG")
    if not kubeconfig:
        return None
    names = [name.strip() for name in os.environ.get("E2E_CAPABILITIES", "").split(",")]
    kit = find_kit()
    return Cluster(
        kubeconfig=Path(kubeconfig).absolute(),
        kubectl_program=_program("kubectl", kit),
        helm_program=_program("helm", kit),
        image=os.environ.get("E2E_IMAGE", KESTRL),
        engine_image=os.environ.get("E2E_ENGINE_IMAGE", ENGINE),
        capabilities=frozenset(Capability(name) for name in names if name),
        cache=cache_folder() / "e2e",
    )


def _program(name: str, kit: Kit | None) -> str:
    found = shutil.which(name) if kit is None else kit.program(name)
    if found is None:
        raise Unavailable(f"E2E_KUBECONFIG is set, but there is no {name}")
    return found


def usable_kit() -> Kit:
    """The kit, if a node can be brought up with it.

    Raises:
        Unavailable: A node cannot be brought up.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise Unavailable("a node of our own needs root on Linux; or set E2E_KUBECONFIG")
    absent = missing()
    if absent:
        raise Unavailable(f"a node of our own needs {', '.join(absent)}; or set E2E_KUBECONFIG")
    if not BRIDGED.exists():
        raise Unavailable("a node of our own needs the kernel's br_netfilter; or set E2E_KUBECONFIG")
    kit = find_kit()
    if kit is None:
        raise Unavailable("Kubernetes is not built: run tests/e2e/kit/build")
    return kit


def facade(node: Node) -> Cluster:
    """The cluster of a node, with the images that were built for it."""
    state = node.state
    archive = os.environ.get("KESTRL_E2E_IMAGES")
    built = frozenset[str]()
    if archive and not state.layout.control_plane_only:
        import_images(state.layout, state.kit, [Path(archive)], "--base-name", BUILT)
        built = built_names(Path(archive))
    return Cluster(
        kubeconfig=state.layout.kubeconfig(),
        kubectl_program=state.kit.program("kubectl"),
        helm_program=state.kit.program("helm"),
        image=KESTRL,
        engine_image=ENGINE,
        capabilities=ANYWHERE if state.layout.control_plane_only else OWN,
        cache=state.layout.folder / "cache",
        own=node,
        built=built,
        release=Path(archive).parent / "release" if archive and built else None,
    )


@contextmanager
def connected(*, control_plane_only: bool = False) -> Generator[Cluster]:
    """A cluster for the duration of a block.

    Raises:
        Unavailable: No cluster is available.
    """
    named = foreign()
    if named is not None:
        yield named
        return
    kit = usable_kit()
    name = default_name(control_plane_only=control_plane_only)
    if os.environ.get("KESTRL_E2E_KEEP") == "1":
        kept = find(default_name()) or find(name)
        if kept is not None:
            kept.revive()
        yield facade(kept or bring_up(kit, name=name, control_plane_only=control_plane_only))
        return
    node = bring_up(kit, name=f"{name}-{os.getpid()}", control_plane_only=control_plane_only, ends_with_parent=True)
    try:
        yield facade(node)
    finally:
        node.down()
