"""One machine as a `Site`: ports on loopback, the folder of the run, and the resolved addresses of the job."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kestrl._app.downloads import fetched_files, present_files, with_fetched_data
from kestrl._app.engines.interpreter import ENGINE_FOLDER, engine_build, engine_python
from kestrl._app.engines.variables import sockets_note, unused_variables
from kestrl._app.interpreters import requirements
from kestrl._app.interpreters.agents import agent_python
from kestrl._app.local.devices import LocalDevice, devices_for
from kestrl._app.local.memory import machine_devices
from kestrl._app.local.rundir import ENGINES, RunDir
from kestrl._app.ports import LOOPBACK, reserved_port
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.devices import device_needs
from kestrl._shared.plan.environments import environment_requirements
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.settings.common import SettingsModel
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl._shared.plan.tools import NO_FILES, runtime_class, sandbox_claim
from kestrl._shared.spec import AgentRLJob
from kestrl.data.locate import locate_data, locate_model
from kestrl.errors import UserInputError
from kestrl.storage.uris import file_uri, is_local
from kestrl.storage.uris import local_path as path_of

if TYPE_CHECKING:
    from kestrl._shared.spec.environments import Environment
    from kestrl.storage import ObjectStore

HIGHEST_PORT = 65535
NAMELESS = ReplicaEndpoint(bind="", host="", port=0)
"""Endpoint of a component that is only planned."""
ENVIRONMENT_FIELD = "spec.environment.python.requirements"
METRICS = "metrics"
Listener = tuple[Role, int] | tuple[Role, int, str]


def listeners(job: AgentRLJob) -> Iterator[Listener]:
    """Every replica, then every Prometheus endpoint, in a fixed order. Engines serve metrics on their own port."""
    yield from replicas(job)
    yield from ((*replica, METRICS) for replica in replicas(job) if replica[0] is not Role.ENGINE)


def replicas(job: AgentRLJob) -> Iterator[tuple[Role, int]]:
    """Every replica in a fixed order."""
    spec = job.spec
    counts = {
        Role.ENGINE: spec.inference.replicas.min,
        Role.INFERENCE: spec.inference.replicas.min,
        Role.TOOLS: 1,
        Role.JUDGE: 1,
        Role.ROLLOUT: spec.rollout.replicas,
        Role.LEARNER: 1,
    }
    for role, count in counts.items():
        for index in range(count):
            yield role, index


@contextmanager
def reserved_ports(job: AgentRLJob, base_port: int | None) -> Generator[dict[Listener, int]]:
    """A port of the loopback for every listener: free ports chosen by the kernel, or consecutive ones from `base_port`.

    They are reserved while the context is open.

    Raises:
        UserInputError: A port is taken, or there are not enough ports above `base_port`.
    """
    ports: dict[Listener, int] = {}
    with ExitStack() as reservations:
        for offset, replica in enumerate(listeners(job)):
            port = 0 if base_port is None else base_port + offset
            if port > HIGHEST_PORT:
                raise UserInputError(
                    f"--base-port {base_port}: the job needs {len(list(listeners(job)))} ports, and the highest is "
                    f"{HIGHEST_PORT}"
                )
            try:
                ports[replica] = reservations.enter_context(reserved_port(LOOPBACK, port))
            except OSError as error:
                raise UserInputError(
                    f"--base-port {base_port}: port {port} for {'-'.join(map(str, replica))} is taken: {error.strerror}"
                ) from error
        yield ports


def reserve_engine(ports: dict[Listener, int], index: int, reservations: ExitStack) -> None:
    """Adds free ports for one more engine and its agent, reserved until `reservations` is closed.

    Raises:
        UserInputError: There is no free port.
    """
    for listener in ((Role.ENGINE, index), (Role.INFERENCE, index), (Role.INFERENCE, index, METRICS)):
        if listener in ports:
            continue
        try:
            ports[listener] = reservations.enter_context(reserved_port())
        except OSError as error:
            raise UserInputError(f"no port of {LOOPBACK} is free for engine-{index}: {error.strerror}") from error


def local_path(uri: str | None, base: Path, field: str) -> str | None:
    """Local path of a file in the manifest: a path relative to the manifest, or file://.

    Raises:
        UserInputError: The file does not exist.
    """
    if uri is None:
        return None
    path = base / path_of(uri)
    if not path.is_file():
        raise UserInputError(f"{field}: {path} does not exist")
    return str(path.resolve())


def storage_root(job: AgentRLJob, base: Path) -> str | None:
    """Storage address of all runs of the job, with paths relative to the manifest; None if the job sets none."""
    uri = job.spec.storage.uri
    if uri is None or not is_local(uri):
        return uri and uri.rstrip("/")
    return file_uri(base / path_of(uri))


def storage_address(job: AgentRLJob, run: RunDir, base: Path) -> str:
    """Storage address of a run: its own folder, or a subfolder of the job's storage."""
    root = storage_root(job, base)
    return file_uri(run.path) if root is None else f"{root}/{run.id}"


def refuse_cluster_isolation(job: AgentRLJob) -> None:
    """Refuses a job whose tools ask for a RuntimeClass or claim sandboxes, which only a cluster has.

    Raises:
        UserInputError: They do; without it they would be isolated less than the job states.
    """
    runtime = runtime_class(job.spec, Role.TOOLS)
    if runtime is not None:
        raise UserInputError(
            f"{runtime[1]}: is {runtime[0]}, and only a cluster has RuntimeClasses: on this machine tools would be "
            "isolated less; remove it to run here"
        )
    claim = sandbox_claim(job.spec)
    if claim is not None:
        raise UserInputError(
            f"{claim[1]}: names the warm pool {claim[0].warm_pool}, and only a cluster has warm pools of sandboxes: on "
            "this machine code would run in a sandbox of the tool service; remove it to run here"
        )


def local_devices(job: AgentRLJob) -> dict[str, tuple[LocalDevice, ...]]:
    """Devices of this machine of the profiles that a job uses.

    Raises:
        UserInputError: They cannot be listed.
    """
    return devices_for(need.profile for need in device_needs(job.spec))


def engine_warnings(job: AgentRLJob, base: Path) -> tuple[str, ...]:
    """What may be unexpected of the engine that a job gets on this machine.

    Raises:
        UserInputError: There is none that it can use.
    """
    return tuple(filter(None, (engine_build(job.spec.inference, base).doubt, unused_variables(), sockets_note())))


def interpreter_of(environment: Environment | None, *, field: str = ENVIRONMENT_FIELD) -> str | None:
    """Interpreter of an environment, which is made if it is not there; None if there is no environment.

    Raises:
        UserInputError: It cannot be made; the message has the field.
    """
    if environment is None:
        return None
    needed = environment_requirements(environment)
    version = environment.python.version
    return str(requirements.environment_python(needed, python=version, field=field, say=requirements.say))


def site_of(
    job: AgentRLJob,
    run: RunDir,
    manifest_dir: Path,
    *,
    ports: Mapping[Listener, int],
    cache_dir: Path,
    devices: Mapping[str, Sequence[LocalDevice]] | None,
    environment_python: str | None = None,
    installs: bool = True,
    opened: Callable[[str], ObjectStore] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Site:
    """The site of a run on this machine, with the `reserved_ports` of its listeners and the `local_devices` of its
    profiles; without devices the plan assigns none, and without `installs` the agent has no interpreter of its own.
    `environment_python` is the interpreter of the job's environment. With `opened`, which opens the store at an
    address, data of object stores and files that tools read are downloaded; `say` takes lines on how far that is.

    Raises:
        UserInputError: The model, the data or the template cannot be found, or there are not enough devices.
    """
    if opened is None:
        files = present_files(job, manifest_dir)
    else:
        job = with_fetched_data(job, cache_dir, opened)
        files = fetched_files(job, manifest_dir, opened, say)
    spec = job.spec
    model = locate_model(spec.model.base, base=manifest_dir)
    needs = tuple(device_needs(spec))

    def endpoint(role: Role, index: int) -> ReplicaEndpoint:
        return ReplicaEndpoint(
            bind=LOOPBACK,
            host=LOOPBACK,
            port=ports[role, index],
            metrics_port=ports.get((role, index, METRICS)),
        )

    def data(uri: str, size: int | None, field: str) -> str:
        return str(
            locate_data(uri, size=size, base=manifest_dir, seed=spec.data.seed, cache_dir=cache_dir, field=field)
        )

    validation = spec.data.validation
    template = spec.agent.template
    return Site(
        run=run.id,
        endpoint=endpoint,
        model=model,
        template=local_path(template.uri if template else None, manifest_dir, "spec.agent.template.uri"),
        train=data(spec.data.train.uri, spec.data.train.size, "spec.data.train.uri"),
        validation=None if validation is None else data(validation.uri, validation.size, "spec.data.validation.uri"),
        storage=storage_address(job, run, manifest_dir),
        database=f"sqlite:///{run.path / 'ledger.db'}",
        work_dir=str(run.path / "work"),
        engines_file=str(run.path / ENGINES),
        engine_python=engine_python(spec.inference, manifest_dir),
        engine_path=str(run.path / ENGINE_FOLDER),
        environment_python=environment_python,
        files=files,
        python_path=(str(manifest_dir.resolve()),),
        agent_python=agent_python(spec.agent) if installs else None,
        devices=None if devices is None else machine_devices(job, needs, devices, model=model, cache_dir=cache_dir),
    )


def relocated(site: Site, generated: Path, cache_dir: Path) -> Site:
    """Copy of a site with the paths of generated data moved to the cache folder."""

    def moved(path: str) -> str:
        return str(cache_dir / Path(path).relative_to(generated)) if Path(path).is_relative_to(generated) else path

    validation = None if site.validation is None else moved(site.validation)
    return replace(site, train=moved(site.train), validation=validation)


def planned_settings(
    job: AgentRLJob,
    base: Path,
    *,
    model: str,
    template: str | None,
    environment_python: str | None,
    agent_python: str | None = None,
    files: Mapping[str, str] = NO_FILES,
) -> dict[Role, SettingsModel]:
    """Settings of each component as in a run, for a site without addresses."""
    site = Site(
        run="check",
        endpoint=lambda _role, _index: NAMELESS,
        model=model,
        template=template,
        train="",
        validation=None,
        storage="",
        database="",
        work_dir="",
        environment_python=environment_python,
        agent_python=agent_python,
        files=files,
        python_path=(str(base.resolve()),),
    )
    return {item.role: item.settings for item in plan(job, site) if item.settings is not None}
