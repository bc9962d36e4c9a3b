"""The site of a job: addresses, folders, and the resolved addresses of the job. Input of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.devices import MachineDevices
from kestrl._shared.plan.settings.common import DNS
from kestrl._shared.plan.settings.inference import POD
from kestrl._shared.spec.inference import Accelerator
from kestrl.errors import UserInputError


class ReplicaEndpoint(NamedTuple):
    """Address of one replica of a component."""

    bind: str
    """Interface to bind."""
    host: str
    """Host name for other components."""
    port: int
    metrics_port: int | None = None
    """Port of the Prometheus endpoint; an engine serves metrics on its own port."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def listen(self) -> str:
        return f"{self.bind}:{self.port}"

    @property
    def metrics_listen(self) -> str | None:
        return None if self.metrics_port is None else f"{self.bind}:{self.metrics_port}"


class EngineService(NamedTuple):
    """The name behind which all engines of a job are found, on a cluster."""

    host: str
    agent_port: int
    engine_port: int

    @property
    def agents(self) -> str:
        """Address of all agents."""
        return f"{DNS}{self.host}:{self.agent_port}"

    @property
    def engines(self) -> str:
        """Address of all engines."""
        return f"{DNS}{self.host}:{self.engine_port}"

    @property
    def engine_of_pod(self) -> str:
        """URL of the engine in a pod, for whom the pod's name stands in the place of `POD`."""
        return f"http://{POD}.{self.host}:{self.engine_port}"


class Build(NamedTuple):
    """Properties of engine and learner on a kind of device."""

    device: str
    """Device name in torch: cpu, cuda or npu."""


BUILDS: Mapping[str, Build] = {"cpu": Build("cpu"), "nvidia": Build("cuda"), "ascend": Build("npu")}
"""Builds by accelerator profile, on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A site to run in: names of Services on a cluster, ports on loopback on one machine."""

    run: str
    """The run's id."""
    endpoint: Callable[[Role, int], ReplicaEndpoint]
    """Address of replica n of a role."""
    model: str
    """Folder or Hugging Face id of the base model."""
    template: str | None
    """File of the chat template, if the job has one."""
    train: str
    """File of the training scenarios."""
    validation: str | None
    storage: str
    """Object-store address of the run's folder."""
    database: str
    """SQLAlchemy address of the ledger."""
    work_dir: str
    """A folder that an engine and its agent share."""
    engine_python: str | None = None
    """Interpreter with the engine; None for that of the other components."""
    engine_path: str | None = None
    """Folder with what runs in the engine's interpreter; None where that is installed in it."""
    environment_python: str | None = None
    """Interpreter of the job's environment; None where it has none, or has not been made."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths of the files that tools read, by their uri."""
    python_path: tuple[str, ...] = ()
    """Folders with the user's own code."""
    agent_python: str | None = None
    """Interpreter with the requirements of `agent.python`; None for that of the workers."""
    builds: Mapping[str, Build] = field(default_factory=lambda: BUILDS)
    """Builds by accelerator profile; the administrator of a cluster may add some."""
    workers: tuple[str, ...] | None = None
    """Address of all rollout workers if their number may change: `dns://host:port`. None: the address of each
    replica."""
    engine_service: EngineService | None = None
    """Where all engines are found if their number may change, on a cluster."""
    engines_file: str | None = None
    """File that lists the engines of the run while it goes on; None where their number cannot change."""
    templates: bool = False
    """Whether one component represents all replicas of its role, as in a pod template: each replica reads its ordinal
    at run time, and its engine runs in the same pod."""
    ranks_port: int | None = None
    """Port of the learner's pod where ranks of other pods join; None where all ranks are on one machine."""
    keep_alive: bool = False
    """Whether the learner stays alive after the run to report the result, for platforms that restart ended programs."""
    devices: MachineDevices | None = None
    """Assigned devices of one machine; None where a device plugin assigns them."""
    traceparent: str | None = None
    """W3C trace context of the run."""

    def build(self, accelerator: Accelerator, part: str) -> Build:
        """Build of a part of the job for its accelerator.

        Raises:
            UserInputError: The profile is unknown at this site.
        """
        site_build = self.builds.get(accelerator.profile)
        if site_build is None:
            raise UserInputError(
                f"spec.{part}.accelerator.profile: {accelerator.profile!r} is not one of "
                f"{', '.join(sorted(self.builds))}"
            )
        return site_build
