"""The models of `spec.environment`: somebody's task with its own reset, steps and score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from kestrl._shared.spec.model import Model, PositiveInt
from kestrl._shared.spec.scalars import BaseUrl, Duration, ImageName, ImportPath, JsonObject, RuntimeClassName

Requirement = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?\s*[^\n#]*$", max_length=500)
]
PythonVersion = Annotated[str, Field(pattern=r"^3\.(1[1-9]|[2-9][0-9])(\.[0-9]+)?$")]
GeneratorName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
PluginName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,99}$")]
"""Name of a package that brings a task set or a harness of verifiers."""
NAME = "environment"
"""Name of the environment of a job: in `Episode.environments`, and of its entry in the tool service."""


class EnvironmentPython(Model):
    """The interpreter of an environment."""

    requirements: Annotated[list[Requirement], Field(max_length=256)] = []
    """Packages that are installed in it, as pip takes them, such as `reasoning-gym==0.1.25`; once for each list."""
    version: PythonVersion | None = None
    """Version of Python, from 3.11, such as 3.12. Default: that of KestRL."""


class AdapterEnvironment(Model):
    """An adapter of your own: a class with `reset`, `act` or tools, and `get_reward`."""

    use: ImportPath
    """Import path of the class, beside the manifest or in a package of `python.requirements`."""
    config: JsonObject = {}
    """Keyword arguments of the class."""


class TrlEnvironment(Model):
    """A class for TRL's `environment_factory`, unchanged: its public methods are tools, `get_reward` is its reward."""

    use: ImportPath
    """Import path of the class, beside the manifest or in a package of `python.requirements`."""


class ReasoningGymEnvironment(Model):
    """A generator of reasoning-gym: one question, one answer."""

    generator: GeneratorName
    """Name of the generator, such as chain_sum."""
    config: JsonObject = {}
    """Settings of the generator, the same as those of `kestrl data reasoning-gym`; rows have seed and position."""


class OpenEnvEnvironment(Model):
    """A server of OpenEnv whose actions are the model's turns."""

    url: BaseUrl | None = None
    """URL of a running server, such as http://127.0.0.1:8000."""
    app: ImportPath | None = None
    """Import path of the server's application, which is started with the environment, such as
    echo_env.server.app:app."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.url is None) == (self.app is None):
            raise ValueError("give `url` of a running server or `app` to start one, and one of them only")
        return self


class VerifiersEnvironment(Model):
    """A task set of verifiers, which runs its episodes itself: one request of its environment server for each."""

    taskset: PluginName
    """Name of the task set: a package beside the manifest, of `python.requirements`, or one of verifiers' own."""
    harness: PluginName | None = None
    """Name of the program that plays it, such as `null` for a plain chat. Default: the task set's own, or `bash`."""
    config: JsonObject = {}
    """Further settings of the environment as verifiers has them, such as `{agent: {timeout: {scoring: 30}}}`. The
    harness runs as a process of this machine (`agent.runtime`), and `agent.max_turns`, `max_output_tokens` and
    `max_total_tokens` are those of the job, unless they stand here."""


class Environment(Model):
    """The environment of a job, in place of `tools`."""

    verifiers: VerifiersEnvironment | None = None
    trl: TrlEnvironment | None = None
    openenv: OpenEnvEnvironment | None = None
    reasoning_gym: ReasoningGymEnvironment | None = None
    adapter: AdapterEnvironment | None = None
    python: EnvironmentPython = EnvironmentPython()
    """Its interpreter on one machine, in which nothing of KestRL's services runs."""
    image: ImageName | None = None
    """Image with the class, server or task set, its requirements and a `python3` from 3.11, for a container of its own
    on a cluster, which needs it; a task set of verifiers has pods of its own. On one machine it is not used."""
    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Pods with a container of `image`; each plays up to `sessions` episodes, and each worker plays in one of them."""
    runtime_class_name: RuntimeClassName | None = None
    """RuntimeClass of these pods, such as gvisor. Default: that of all tools of the cluster."""
    sessions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Episodes that it plays at the same time; further ones wait for a place within `rollout.deadlines.tool`. Default:
    as many as the workers run."""
    start_timeout: Duration = 600.0
    """Time limit of its start: importing it, and starting its server."""
    memory_mb: PositiveInt | None = None
    """Maximum memory of one episode in MiB, in addition to what the imported module takes. Default: no limit."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(self._kinds) != 1:
            raise ValueError("give `verifiers`, `trl`, `openenv`, `reasoningGym` or `adapter`, and one of them only")
        return self

    @property
    def _kinds(self) -> Mapping[str, Model]:
        kinds = {
            "verifiers": self.verifiers,
            "trl": self.trl,
            "openenv": self.openenv,
            "reasoningGym": self.reasoning_gym,
            "adapter": self.adapter,
        }
        return {name: kind for name, kind in kinds.items() if kind is not None}

    @property
    def kind(self) -> str:
        """Name of the field with the kind."""
        return next(iter(self._kinds))

    @property
    def owns_loop(self) -> bool:
        """Whether it runs its episodes itself, by their URL, so that no loop of the worker plays it."""
        return self.verifiers is not None
