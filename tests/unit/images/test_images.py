"""Dockerfiles: what they are built from, what is in them by the lock, and that the chart names them all. Nothing is
built here."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kestrl._app.engines.builds import DEFAULTS, lock_name
from kestrl_operator.render.commands import INIT

ROOT = Path(__file__).parents[3]
FILES = {
    path.name.removesuffix(".Dockerfile"): path.read_text()
    for path in sorted((ROOT / "Dockerfiles").glob("*.Dockerfile"))
}
LIGHT = ("operator", "agent", "rollout", "tools", "judge", "page")
THIN = ("engine-cuda", "engine-npu", "sglang-cuda")
C_COMPILER = (
    "RUN command -v gcc || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev"
    " && rm -rf /var/lib/apt/lists/*)"
)
ENGINES = (*THIN, "engine-cpu")
USER = "USER 10001:10001"


def last_stage(text: str) -> str:
    return text[text.rindex("\nFROM ") :]


def packages(text: str) -> set[str]:
    return set(re.findall(r"--package ([\w-]+)", text))


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "charts" / "kestrl" / "values.yaml").read_text())


def test_the_chart_names_every_image_and_no_other(values: dict[str, Any]) -> None:
    named = {image.rpartition(":")[0] for image in json.dumps(values).split('"') if image.startswith("ghcr.io/")}
    chips = {f"{name}-a3" for name in FILES if name.endswith("-npu")}
    assert named == {f"ghcr.io/kestrl/{name}" for name in chips.union(FILES)}


@pytest.mark.parametrize("name", FILES)
def test_an_image_has_a_pinned_base_and_an_unprivileged_user(name: str) -> None:
    text = FILES[name]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    repository, _, tag = re.sub(r"\$\{CHIP[^}]*\}?\}", "", base).rpartition(":")
    assert "/" in repository, "a registry is named"
    assert re.search(r"\d+\.\d+\.\d+", tag), "a tag of a whole version, not one that moves"
    assert "latest" not in text
    assert {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")} == {"${BASE}"}
    assert re.findall(r"^USER .*", last_stage(text), re.MULTILINE)[-1] == USER
    assert text.index(USER) > text.rindex("\nCOPY "), "what is in the image is not its user's to change"


@pytest.mark.parametrize("name", FILES)
def test_an_image_says_what_it_is(name: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', last_stage(FILES[name])))
    assert labels.keys() == {"title", "description", "version", "licenses"}
    assert labels["title"] == f"kestrl-{name}"
    assert (labels["version"], labels["licenses"]) == ("${VERSION}", "Apache-2.0")


@pytest.mark.parametrize("name", FILES)
def test_what_an_image_installs_and_copies_exists(name: str) -> None:
    text = FILES[name]
    members = [ROOT, ROOT / "operator", ROOT / "examples" / "email-search", *(ROOT / "services").iterdir()]
    known = {tomllib.loads((member / "pyproject.toml").read_text())["project"]["name"] for member in members}
    assert packages(text) <= known
    copied = re.findall(r"^COPY (?!--from|wheels )(.*) \S+$", text, re.MULTILINE)
    assert all((ROOT / path).exists() for line in copied for path in line.split())


@pytest.mark.parametrize("name", [name for name in FILES if name not in ENGINES])
def test_what_is_ours_in_an_image_comes_out_of_wheels_and_the_rest_by_the_lock(name: str) -> None:
    text = FILES[name]
    assert re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) == ["pyproject.toml uv.lock ./", "wheels /wheels"]
    (line,) = re.findall(r"pip install (?:--python \S+ )?--no-index --find-links /wheels (.*)$", text, re.MULTILINE)
    wheels = [word.partition("[") for word in shlex.split(line)]
    assert {package for package, _, _ in wheels} == packages(text)
    assert [f"--extra {extra.rstrip(']')}" for _, _, extra in wheels if extra] == re.findall(
        r"--extra \w+", text[: text.index("COPY wheels")]
    )


@pytest.mark.parametrize("name", FILES)
def test_process_1_of_an_image_is_the_init_that_pods_name(name: str) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", FILES[name], re.MULTILINE)
    assert tuple(json.loads(entry)[: len(INIT)]) == INIT
    assert "apt-get install --yes --no-install-recommends catatonit" in last_stage(FILES[name])
    assert "catatonit" in (ROOT / "scripts" / "build_base").read_text(), "a base without a registry has it"


def test_the_learner_for_nvidia_gpus_has_the_c_compiler_that_triton_needs() -> None:
    assert C_COMPILER in last_stage(FILES["learner-cuda"]).splitlines()


def test_the_tools_of_the_builds_are_the_makefile_s() -> None:
    (uv,) = re.findall(r"^UV_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {version for text in FILES.values() for version in re.findall(r"^ARG UV=(\S+)$", text, re.MULTILINE)}
    assert named == {uv}


def test_the_environment_and_that_of_the_engine_are_installed_by_one_uv() -> None:
    """Versions of uv may have caches of their own, and environments share the files of one cache."""
    (makefile,) = re.findall(r"^UV_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    assert [package["version"] for package in lock["package"] if package["name"] == "uv"] == [makefile]


def test_torch_npu_is_made_for_the_torch_of_the_lock() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (torch,) = (package["version"] for package in lock["package"] if package["name"] == "torch")
    (npu,) = re.findall(r"^ARG TORCH_NPU=(\S+)$", FILES["learner-npu"], re.MULTILINE)
    assert npu.split(".post")[0] == torch


def exported(text: str, *arguments: str) -> set[str]:
    """Names of the distributions that an image's packages resolve to, by the lock."""
    extras = re.search(r"(?:--extra \w+|--group [\w-]+)", text)
    command = [
        str(ROOT / ".tools" / "bin" / "uv"),
        "export",
        "--frozen",
        "--no-default-groups",
        "--no-hashes",
        "--no-emit-workspace",
    ]
    command += [word for name in sorted(packages(text)) for word in ("--package", name)]
    command += extras[0].split() if extras else []
    ended = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^([\w.-]+)==", ended.stdout, re.MULTILINE))


@pytest.mark.parametrize("name", LIGHT)
def test_light_images_have_no_torch(name: str) -> None:
    resolved = exported(FILES[name])
    assert {"grpcio", "pydantic"} <= resolved
    heavy = ("torch", "vllm", "transformers", "peft", "nvidia-", "triton", "sqlalchemy")
    assert [package for package in resolved if package.startswith(heavy)] == []


@pytest.mark.parametrize("name", ["learner-cpu", "learner-npu"])
def test_images_for_cpus_leave_cuda_to_others(name: str) -> None:
    assert "--prune torch" in FILES[name]
    without = exported(FILES[name], "--prune", "torch")
    assert [package for package in without if package.startswith(("torch", "nvidia-", "cuda-"))] == []
    assert "torch" in exported(FILES[name]), "its version is the lock's"


def test_the_engine_for_cpus_is_that_of_the_shipped_lock_without_cuda() -> None:
    (path,) = re.findall(r"^COPY (\S+) /lock.txt$", FILES["engine-cpu"], re.MULTILINE)
    lock = ROOT / path
    assert lock.name == lock_name("vllm", DEFAULTS["vllm", "cpu"], "cpu")
    (kept,) = re.findall(r"^RUN (awk '.*') /lock.txt >/rest.txt", FILES["engine-cpu"], re.MULTILINE)
    (named,) = re.findall(r"&& (sed -n '.*') /lock.txt >/versions.txt", FILES["engine-cpu"])
    rest, versions = (
        subprocess.run(f"{command} {shlex.quote(str(lock))}", shell=True, capture_output=True, text=True, check=True)
        for command in (kept, named)
    )
    entries = {entry.partition("==")[0]: entry for entry in re.split(r"\n(?=\S)", lock.read_text().strip())}
    left_out = {name for name in entries if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))}
    assert {"torch", "triton", "nvidia-cublas", "cuda-bindings"} <= left_out
    names = {entry.partition("==")[0] for entry in re.split(r"\n(?=\S)", rest.stdout.strip())}
    assert names == entries.keys() - left_out
    assert all(re.fullmatch(r"\S+==\S+( ; .+)?", line) for line in versions.stdout.splitlines())
    assert {line.partition("==")[0] for line in versions.stdout.splitlines()} == entries.keys()


def test_only_the_operators_image_has_what_talks_to_kubernetes() -> None:
    for name in set(FILES) - set(ENGINES):
        assert ({"kopf"} <= exported(FILES[name])) == (name == "operator"), name


def test_images_of_a_kind_differ_in_what_they_run_alone() -> None:
    def shape(name: str) -> str:
        text = re.sub(
            r"^#.*$|(?: --(?:package|extra|group) [\w-]+)+|(?<=/wheels ).*|org\.opencontainers\.image\.description=.*",
            "",
            FILES[name].replace(C_COMPILER, ""),
            flags=re.MULTILINE,
        )
        return re.sub(r"kestrl[\w.]*\"\]$", "", text.replace(f"kestrl-{name}", ""), flags=re.MULTILINE)

    assert len({re.sub(r"\n+", "\n", shape(name)) for name in (*LIGHT, "learner-cuda")}) == 1
    assert len({re.sub(r"^ARG (BASE|CHIP)=.*\n", "", shape(name), flags=re.MULTILINE) for name in THIN}) == 1


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gets_what_runs_in_it_and_nothing_else(name: str) -> None:
    inside = ROOT / "services" / "inference" / "src" / "kestrl_inference" / "inside"
    source = "\n".join(path.read_text() for path in inside.rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    others = imported - sys.stdlib_module_names - {"torch"}
    assert others == {"kestrl_inference"}, "the engine's own environment need not have it"
    assert re.findall(r"kestrl_inference\.(\w+)", source) == ["inside"] * source.count("kestrl_inference.")
    assert "pip" not in FILES[name] or name == "engine-cpu"
    for plugin in ("vllm_plugin", "sglang_plugin"):
        assert f"kestrl = kestrl_inference.inside.{plugin}:register" in FILES[name]


def test_the_build_script_names_the_images_it_knows() -> None:
    script = ROOT / "scripts" / "build_images"
    ended = subprocess.run([str(script), "nope"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "there is no image nope" in ended.stderr
    (cpu,) = re.findall(r"^CPU=\((.*)\)$", script.read_text(), re.MULTILINE)
    assert set(cpu.split()) == {*LIGHT, "learner-cpu", "engine-cpu"}


WHEEL = "kestrl-0.1.0-py3-none-any.whl"
FAKE_BUILDERS = {
    "docker": """#!/bin/sh
[ "$1" = build ] || exit 0
echo "$@" >>"$BUILT"
for last; do :; done
(cd "$last" && find . -type f) >"$BUILT.context"
""",
    "skopeo": """#!/bin/sh
for last; do :; done
case $last in *gone*) echo none ;; *) echo sha256:$(echo "$last" | wc -c) ;; esac
""",
}


def built(folder: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Images built by programs that only note how they were called."""
    for name, text in FAKE_BUILDERS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    wheels = folder / "release"
    if not wheels.exists():
        wheels.mkdir()
        (wheels / WHEEL).write_bytes(b"wheel")
        (wheels / "SHA256SUMS").write_text(f"{hashlib.sha256(b'wheel').hexdigest()}  {WHEEL}\n")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "BUILT": str(folder / "built"), "WHEELS": str(wheels)}
    environment |= variables
    command = [str(ROOT / "scripts" / "build_images"), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


def test_pinned_images_are_built_on_the_digest_of_their_tag(tmp_path: Path) -> None:
    names = ("operator", "engine-npu", "engine-npu-a3", "learner-npu-a3")
    done = built(tmp_path, *names, PIN="1")
    assert done.returncode == 0, done.stderr
    bases = re.findall(r"BASE=(\S+)@sha256:\d+ ", (tmp_path / "built").read_text())
    assert bases == [
        "docker.io/library/python",
        "quay.io/ascend/vllm-ascend",
        "quay.io/ascend/vllm-ascend",
        "quay.io/ascend/cann",
    ]
    tags = ("v0.23.0", "v0.23.0-a3", "9.1.0-a3-ubuntu22.04-py3.11")
    lengths = [len(f"docker://{base}:{tag}\n") for base, tag in zip(bases[1:], tags, strict=True)]
    assert [int(number) for number in re.findall(r"@sha256:(\d+)\n", done.stdout)][1:] == lengths, "each chip's own tag"


def test_an_image_is_not_built_on_a_base_without_a_digest(tmp_path: Path) -> None:
    done = built(tmp_path, "operator", PIN="1", BASE="registry.example/gone:1")
    assert done.returncode == 1
    assert "registry.example/gone:1 has no digest: none" in done.stderr
    assert not (tmp_path / "built").exists()
    assert built(tmp_path, "operator", PIN="1", BASE="r.example/python@sha256:1").returncode == 0
    assert "BASE=r.example/python@sha256:1 " in (tmp_path / "built").read_text(), "a digest of one's own stays"


def test_a_build_sees_the_wheels_the_locks_and_what_runs_in_an_engine(tmp_path: Path) -> None:
    assert built(tmp_path, "operator").returncode == 0
    paths = (tmp_path / "built.context").read_text().splitlines()
    engine = [path for path in paths if path.startswith("./services/inference/src/kestrl_inference/")]
    locks = [path for path in paths if path.startswith("./src/kestrl/_app/engines/locks/")]
    assert {*paths} - {*engine, *locks} == {"./pyproject.toml", "./uv.lock", f"./wheels/{WHEEL}"}
    assert not [path for path in paths if "__pycache__" in path]
    for text in FILES.values():
        for line in re.findall(r"^COPY (?!--from|wheels )(.*) \S+$", text, re.MULTILINE):
            assert all(any(path.startswith(f"./{source}") for path in paths) for source in line.split())


def test_no_image_is_built_of_a_wheel_that_is_not_the_release_s(tmp_path: Path) -> None:
    assert built(tmp_path, "operator").returncode == 0
    (tmp_path / "built").unlink()
    (tmp_path / "release" / WHEEL).write_bytes(b"another")
    done = built(tmp_path, "operator")
    assert done.returncode != 0
    assert f"{WHEEL}: FAILED" in done.stdout
    assert not (tmp_path / "built").exists()
