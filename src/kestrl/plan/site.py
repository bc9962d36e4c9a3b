"""What the plan must be told about the place a job runs in: addresses, folders, what the job's addresses resolved to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kestrl.errors import UserInputError
from kestrl.plan.components import Role
from kestrl.spec.job import Accelerator


class Endpoint(NamedTuple):
    """Where one replica of a component listens."""

    bind: str
    """Interface it binds."""
    host: str
    """Name by which the others reach it."""
    port: int
    metrics_port: int | None = None
    """Where Prometheus finds it; an engine's metrics are at its own port."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def listen(self) -> str:
        return f"{self.bind}:{self.port}"

    @property
    def metrics_listen(self) -> str | None:
        return None if self.metrics_port is None else f"{self.bind}:{self.metrics_port}"


class Build(NamedTuple):
    """What engine and learner are on a kind of device."""

    device: str
    """torch's word for it: cpu, cuda or npu."""
    spare_slots: int = 0
    """Adapter slots of an engine beyond those that live versions need."""
    scale_out: bool = True
    """Whether an engine must be told to open its token routes: vLLM since 0.30."""


BUILDS: Mapping[str, Build] = {"cpu": Build("cpu"), "nvidia": Build("cuda"), "ascend": Build("npu", 1, scale_out=False)}
"""By accelerator profile, on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place to run in. A cluster's is names of Services, one machine's is ports on loopback."""

    run: str
    """The run's id."""
    endpoint: Callable[[Role, int], Endpoint]
    """Where replica n of a role listens."""
    model: str
    """Folder or Hugging Face id of the base model."""
    template: str | None
    """File of the chat template, if the job brings one."""
    train: str
    """File of the training scenarios."""
    validation: str | None
    storage: str
    """Object-store address of the run's folder."""
    database: str
    """SQLAlchemy address of the ledger."""
    work_dir: str
    """A folder that an engine and its agent share."""
    python_path: tuple[str, ...] = ()
    """Folders with the user's own code."""
    builds: Mapping[str, Build] = field(default_factory=lambda: BUILDS)
    """By accelerator profile: a cluster's administrator may have added some."""
    workers: tuple[str, ...] | None = None
    """Where the learner finds rollout workers, where their number may change: `dns://host:port`. None: each replica's own address."""
    templates: bool = False
    """Whether one component stands for all replicas of its role, as a pod template does: each reads its ordinal where it runs, and finds
    its engine beside it."""
    linger: bool = False
    """Whether the learner stays when the run has ended, to tell how: where a program that ends is started again."""
    traceparent: str | None = None
    """W3C trace context that the run belongs to."""

    def build(self, accelerator: Accelerator, part: str) -> Build:
        """What a part of the job is on its accelerator.

        Raises:
            UserInputError: This place knows no such profile.
        """
        known = self.builds.get(accelerator.profile)
        if known is None:
            raise UserInputError(
                f"spec.{part}.accelerator.profile: {accelerator.profile!r} is not one of {', '.join(sorted(self.builds))}"
            )
        return known
