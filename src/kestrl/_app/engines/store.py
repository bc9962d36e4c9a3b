"""Installed engines: a folder with an environment for each engine, version and device.

```
ENGINES/vllm-0.32.0-cpu/    bin/python, lib, ...    lock.txt    engine.json    verified, after `engine check`
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kestrl._app.interpreters.places import data_folder
from kestrl._shared.spec.inference import is_version
from kestrl.errors import UserInputError

VARIABLE = "KESTRL_ENGINES"
"""Environment variable with the folder of installed engines."""
RECORD, VERIFIED = "engine.json", "verified"


class Record(BaseModel):
    """What `engine.json` says."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    engine: str
    version: str
    device: str
    locked: bool
    """Whether a lock that ships with KestRL was installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An installed engine."""

    path: Path
    record: Record

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def verified(self) -> bool:
        """Whether its lock was tested, or the conformance suite passed here."""
        return self.record.locked or (self.path / VERIFIED).exists()

    def __str__(self) -> str:
        return f"{self.record.engine}=={self.record.version}" + (
            "" if self.record.device == "cpu" else f" --device {self.record.device}"
        )


def engines_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of installed engines: that of the variable, or one in the user's data folder."""
    return data_folder("engines", VARIABLE, environment)


def name_of(engine: str, version: str, device: str) -> str:
    """Name of the folder of an engine."""
    return f"{engine}-{version}-{device}"


def installed_engines(folder: Path) -> list[Installed]:
    """The installed engines by name.

    Raises:
        UserInputError: A record is damaged.
    """
    paths = sorted(path.parent for path in folder.glob(f"*/{RECORD}") if not path.parent.name.startswith("."))
    return [read_installed(path) for path in paths]


def read_installed(path: Path) -> Installed:
    """The engine in a folder.

    Raises:
        UserInputError: Its record is damaged.
    """
    try:
        return Installed(path=path, record=Record.model_validate_json((path / RECORD).read_bytes()))
    except ValidationError as error:
        raise UserInputError(f"{path / RECORD} is damaged; remove {path} and install the engine again") from error


def fitting(folder: Path, engine: str, version: str | None, device: str) -> Installed | None:
    """The installed engine that serves: verified ones first, then the newest."""
    serving = [
        installed
        for installed in installed_engines(folder)
        if (installed.record.engine, installed.record.device) == (engine, device)
        and (version is None or is_version(installed.record.version, version))
    ]
    return max(serving, key=lambda installed: (installed.verified, _numbers(installed.record.version)), default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
