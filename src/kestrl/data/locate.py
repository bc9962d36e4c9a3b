"""Resolves addresses of data sets and models to local paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlparse

from kestrl.errors import UserInputError
from kestrl.storage.uris import LOCAL_SCHEMES, local_path, scheme_of

DATA_GROUP = "kestrl.data"
"""Entry points `name -> provide(path, size, seed, cache_dir) -> Path`: data sets that an installed application provides
as `demo://name/path`."""
MODEL_GROUP = "kestrl.models"
"""Entry points `name -> () -> Path`: model folders that an installed application provides as `demo://name`."""
PACKAGES = {
    (MODEL_GROUP, "tiny"): "kestrl-demo-models",
    (MODEL_GROUP, "smollm2"): "kestrl-demo-models[smollm2]",
    (DATA_GROUP, "email"): "kestrl-email",
}
"""Distributions of ours that offer a name, for messages."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A Hugging Face id as other frameworks write it, without hf://; also the form of a relative path."""


def _provider(group: str, name: str, field: str) -> Callable[..., Path]:
    offers = entry_points(group=group)
    for entry in offers:
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    names = ", ".join(sorted(entry.name for entry in offers)) or "none"
    fix = f"; pip install '{PACKAGES[group, name]}'" if (group, name) in PACKAGES else ""
    raise UserInputError(f"{field}: no installed package offers demo://{name} (there are: {names}){fix}")


def _local(uri: str, base: Path, field: str) -> Path:
    path = base / local_path(uri)
    if not path.exists():
        raise UserInputError(f"{field}: {path} does not exist")
    return path.resolve()


def locate_data(uri: str, *, size: int | None, base: Path, seed: int, cache_dir: Path, field: str) -> Path:
    """The file of a data set.

    Args:
        uri: A path (relative to `base`), `file://...`, or `demo://NAME/PATH`, which an installed application generates.
        size: Number of rows; required for generated data.
        base: The manifest's folder.
        seed: Seed of generated data.
        cache_dir: Folder for generated data.
        field: The manifest field, for messages.

    Raises:
        UserInputError: The address does not exist, or no installed package provides it.
    """
    scheme = scheme_of(uri)
    if scheme == "demo":
        cache_dir.mkdir(parents=True, exist_ok=True)
        if size is None:
            raise UserInputError(f"{field}: demo:// data is generated: give its size")
        parsed = urlparse(uri)
        return _provider(DATA_GROUP, parsed.netloc, field)(parsed.path.strip("/"), size, seed, cache_dir)
    if scheme in LOCAL_SCHEMES:
        return _local(uri, base, field)
    raise UserInputError(f"{field}: scheme {scheme}:// is not one a data set can have here (path, file://, demo://)")


def locate_model(uri: str, *, base: Path, field: str = "spec.model.base") -> str:
    """The folder of a model, or its Hugging Face id (`hf://org/name`, downloaded when it is loaded).

    Raises:
        UserInputError: The address does not exist, or no installed package provides it.
    """
    scheme, parsed = scheme_of(uri), urlparse(uri)
    if scheme == "hf":
        return f"{parsed.netloc}{parsed.path}"
    if scheme == "demo":
        folder = _provider(MODEL_GROUP, parsed.netloc, field)()
    elif HUB_ID.fullmatch(uri) and not (base / uri).exists():
        raise UserInputError(f"{field}: {base / uri} does not exist; for the model on Hugging Face write hf://{uri}")
    elif scheme in LOCAL_SCHEMES | {"pvc"}:
        folder = _local(uri, base, field)
    else:
        raise UserInputError(
            f"{field}: scheme {scheme}:// is not one a model can have here (path, file://, hf://, demo://)"
        )
    if not (folder / "config.json").is_file():
        raise UserInputError(f"{field}: {folder} holds no model: config.json is missing")
    return str(folder)
