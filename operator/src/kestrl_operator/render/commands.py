"""What the containers of a job run: the programs of our images as children of an init."""

from __future__ import annotations

from kestrl._shared.plan.components import Component, Role
from kestrl_operator.state.accelerators import Profile
from kestrl_operator.state.cluster import PACKAGES

INIT = ("catatonit", "--")
"""Process 1 of the containers of our images. It passes signals on, and reaps what a tool, a reward or an engine leaves
behind: an orphan of a container becomes a child of its process 1, and counts against the pod's limit of processes until
that has waited for it. `shareProcessNamespace` would do so too, and show each container of a pod the environment of the
others."""


def under_init(profile: Profile, *program: str) -> list[str]:
    """A program of our images, with the environment that its devices need."""
    return [*INIT, *profile.entrypoint, *program]


def command(component: Component, profile: Profile) -> list[str]:
    """The command of a component. A user's image has neither an init nor a package of ours: it finds the packages in a
    volume.
    """
    if component.role is Role.AGENT:
        return [*profile.entrypoint, "python3", f"{PACKAGES}/{component.module.replace('.', '/')}.py"]
    return under_init(profile, component.python or "python", "-m", component.module)
