"""A Secret mounted as the kubelet mounts it: files behind a link that a change replaces at once."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

CURRENT = "..data"


class MountedSecret:
    """The folder of a mounted Secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, content: Mapping[str, str]) -> None:
        """Mounts the Secret with this content."""
        version, link = self.folder / f"..{uuid.uuid4().hex}", self.folder / CURRENT
        version.mkdir()
        for name, text in content.items():
            (version / name).write_text(text)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(Path(CURRENT) / name)
        before = link.resolve() if link.is_symlink() else None
        new = self.folder / "..data_tmp"
        new.symlink_to(version.name)
        new.replace(link)
        for path in self.folder.iterdir():
            if path.is_symlink() and not path.exists():
                path.unlink()
        if before is not None:
            shutil.rmtree(before)
