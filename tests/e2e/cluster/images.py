"""Images from this machine's own files: no registry, no base image, no daemon.

`pause` is Debian's static catatonit. `kestrl` has this interpreter, the shared libraries that it and wheels from PyPI
link to, a static busybox, catatonit and the certificate authorities. The virtual environment is not part of it: pods
have it mounted at its path on the host, first on their PATH, so that `python` in a pod is the environment's. `engine`
is the same with the engine's environment, and has what runs beside an engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kestrl._app.engines.interpreter import write_engine_folder

from .commands import run

PAUSE = "localhost/pause:1"
KESTRL, ENGINE = "localhost/kestrl:e2e", "localhost/engine:e2e"
BUILT = "localhost/kestrl-built"
"""The repository of the images of `Dockerfiles/`, with their names as tags; `tests/e2e/kit/images` builds them."""
USER = 10001
KEPT = 4
"""Archives of each name that are kept; each checkout has its own."""
MANYLINUX = (
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2"),
    *("libnsl.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libz.so.1"),
    "libnuma.so.1",  # for vLLM's build for CPUs
)
"""Libraries that wheels may expect on a system; only those that exist here are added."""
TOOLS = ("lscpu",)
"""Programs used by the virtual environment: vLLM on a CPU runs it to find the machine's cores."""
UNUSED = re.compile(
    r"^(test|tests|idlelib|turtledemo|ensurepip|lib2to3|site-packages|config-3.*|.*\.a|.*\.opt-[12]\.pyc)$"
)
"""Parts of a Python installation that no pod needs."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ACCOUNTS = (
    f"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/false\nkestrl:x:{USER}:{USER}::/tmp:/bin/sh\n"
)
GROUPS = f"root:x:0:\nnogroup:x:65534:\nkestrl:x:{USER}:\n"


@dataclass
class Layer:
    """The files of one layer, by their path within the image."""

    files: dict[str, Path] = field(default_factory=dict[str, Path])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    links: dict[str, str] = field(default_factory=dict[str, str])
    folders: dict[str, int] = field(default_factory=dict[str, int])
    """Empty folders, with their modes."""

    def add(self, path: Path, inside: str | None = None) -> None:
        """Adds a file or a link."""
        if path.is_symlink() and inside is None:
            self.links[_inside(path)] = str(path.readlink())
        else:
            self.files[_inside(inside or path)] = path.resolve()

    def add_tree(self, top: Path) -> None:
        """Adds a folder, except what no pod needs."""
        for folder, names, files in os.walk(top):
            names[:] = sorted(name for name in names if not UNUSED.match(name))
            for name in sorted(files):
                if not UNUSED.match(name):
                    self.add(Path(folder, name))

    def key(self) -> str:
        """A digest of the layer's paths, sizes and times."""
        sizes = {inside: (path.stat().st_size, path.stat().st_mtime_ns) for inside, path in self.files.items()}
        content = [sorted(part.items()) for part in (sizes, self.texts, self.links, self.folders)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tar(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for inside, mode in sorted({**self._parents(), **self.folders}.items()):
                archive.addfile(_entry(inside, tarfile.DIRTYPE, mode))
            for inside, text in self.texts.items():
                content = text.encode()
                archive.addfile(_entry(inside, tarfile.REGTYPE, 0o644, len(content)), io.BytesIO(content))
            for inside, target in self.links.items():
                entry = _entry(inside, tarfile.SYMTYPE, 0o777)
                entry.linkname = target
                archive.addfile(entry)
            for inside, path in self.files.items():
                stat = path.stat()
                entry = _entry(inside, tarfile.REGTYPE, 0o755 if stat.st_mode & 0o100 else 0o644, stat.st_size)
                entry.mtime = int(stat.st_mtime)  # compiled byte-code is only used beside a source of its time
                with path.open("rb") as opened:
                    archive.addfile(entry, opened)
        return buffer.getvalue()

    def _parents(self) -> dict[str, int]:
        named = (*self.files, *self.texts, *self.links, *self.folders)
        return {str(parent): 0o755 for name in named for parent in Path(name).parents if parent.name}


def _inside(path: Path | str) -> str:
    return str(path).lstrip("/")


def _entry(inside: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(inside)
    entry.type, entry.mode, entry.size = kind, mode, size
    return entry


def pause_archive(cache: Path) -> Path:
    """The archive of the image that holds a pod's namespaces."""
    layer = Layer()
    layer.add(_program("catatonit"), "pause")
    return _cached(cache, PAUSE, layer, {"Entrypoint": ["/pause", "-P"]})


def kestrl_archive(cache: Path, environment: Path) -> Path:
    """The archive of the image in which all components but engines run.

    Args:
        cache: Folder of the archives, which are reused.
        environment: The virtual environment whose programs come first on the PATH.
    """
    return _cached(cache, KESTRL, _system(), _configuration(environment))


def engine_archive(cache: Path, environment: Path) -> Path:
    """The archive of the image in which engines run.

    Args:
        cache: Folder of the archives, which are reused.
        environment: The engine's environment, whose programs come first on the PATH.
    """
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / "beside"
        write_engine_folder(beside)
        layer = _system()
        for path in sorted(beside.rglob("*")):
            if path.is_file():
                layer.texts[f"opt/kestrl/{path.relative_to(beside)}"] = path.read_text()
    return _cached(cache, ENGINE, layer, _configuration(environment, "PYTHONPATH=/opt/kestrl"))


def _configuration(environment: Path, *variables: str) -> dict[str, Any]:
    path = f"{environment}/bin:/usr/bin:/bin:/sbin"
    fixed = (f"PATH={path}", "LANG=C.UTF-8", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1")
    return {"Env": [*fixed, *variables], "Cmd": ["/usr/bin/python3"]}


def _system() -> Layer:
    """The interpreter, the libraries and the programs of an image."""
    layer = Layer(texts={"etc/passwd": ACCOUNTS, "etc/group": GROUPS, "etc/nsswitch.conf": "hosts: files dns\n"})
    layer.folders |= {"tmp": 0o1777, "var/tmp": 0o1777}
    layer.folders |= dict.fromkeys(("proc", "sys", "dev", "run", "root", "home"), 0o755)
    _add_python(layer)
    busybox = _program("busybox")
    layer.add(busybox, "bin/busybox")
    layer.add(_program("catatonit"), "usr/bin/catatonit")  # process 1 of a job's containers
    layer.links |= {f"bin/{name}": "/bin/busybox" for name in run(busybox, "--list").split() if name != "busybox"}
    layer.add(Path("/etc/ssl/certs/ca-certificates.crt"), "etc/ssl/certs/ca-certificates.crt")
    return layer


def built_names(archive: Path) -> frozenset[str]:
    """The names in an archive of built images."""
    with tarfile.open(archive) as opened:
        index = opened.extractfile("./index.json")
        assert index is not None
        manifests = json.load(index)["manifests"]
    return frozenset(item["annotations"]["org.opencontainers.image.ref.name"] for item in manifests)


def _add_python(layer: Layer) -> None:
    """Adds the interpreter of the virtual environment at its own path: the environment's `python` is a link to it."""
    executable, base = Path(sys.executable).resolve(), Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib"))
    extensions = sorted((library / "lib-dynload").glob("*.so"))
    layer.add(executable)
    layer.add_tree(library)
    tools = [_program(name) for name in TOOLS]
    for tool in tools:
        layer.add(tool)
    linked = set(_linked([executable, *extensions, *tools])) | set(_of_the_system(MANYLINUX))
    for path in sorted(linked):
        layer.add(Path(path), path)
    for name in ("python3", "python"):
        layer.links[f"usr/bin/{name}"] = str(executable)
        layer.links.setdefault(_inside(base / "bin" / name), str(executable))
    layer.links.pop(_inside(executable), None)


def _linked(programs: Sequence[Path]) -> Iterator[str]:
    """Paths of the shared libraries of programs, including the dynamic loader."""
    for match in re.finditer(r"(/\S+) \(0x", run("ldd", *programs)):
        yield match.group(1)


def _of_the_system(names: Iterable[str]) -> Iterator[str]:
    """Paths of libraries as found by the dynamic loader."""
    listed = re.findall(r"^\s*(\S+) \(libc6,(?:x86-64|AArch64).*\) => (\S+)$", run("ldconfig", "-p"), re.MULTILINE)
    known = dict(reversed(listed))
    return (known[name] for name in names if name in known)


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return Path(found).resolve()


def _cached(cache: Path, name: str, layer: Layer, config: dict[str, Any]) -> Path:
    """The archive of an image, created unless there is one with the same content."""
    content = [layer.key(), name, config, Path(__file__).read_text()]
    short = name.rpartition("/")[2].replace(":", "-")
    path = cache / f"{short}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.tar"
    if path.exists():
        path.touch()
        return path
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    _write_archive(unfinished, name, layer.tar(), config)
    unfinished.rename(path)
    older = sorted(cache.glob(f"{short}-*.tar"), key=lambda archive: archive.stat().st_mtime, reverse=True)
    for archive in older[KEPT:]:
        archive.unlink()
    return path


def _write_archive(path: Path, name: str, layer: bytes, config: dict[str, Any]) -> None:
    """Writes an OCI archive with one layer."""
    blobs: dict[str, bytes] = {}

    def put(kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    layers = [put("layer.v1.tar", layer)]
    rootfs = {"type": "layers", "diff_ids": [item["digest"] for item in layers]}
    machine = {"architecture": ARCHITECTURES[platform.machine()], "os": "linux"}
    described = put("config.v1+json", json.dumps({**machine, "config": config, "rootfs": rootfs}).encode())
    manifest = put("manifest.v1+json", json.dumps({"schemaVersion": 2, "config": described, "layers": layers}).encode())
    manifest["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = {"schemaVersion": 2, "manifests": [manifest]}
    with tarfile.open(path, "w") as archive:
        for inside, content in (
            ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
            ("index.json", json.dumps(index).encode()),
            *((f"blobs/sha256/{digest}", content) for digest, content in blobs.items()),
        ):
            archive.addfile(_entry(inside, tarfile.REGTYPE, 0o644, len(content)), io.BytesIO(content))
