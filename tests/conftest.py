"""What all tests share."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kestrl._app.engines.builds import DEFAULTS
from kestrl._app.engines.store import VARIABLE as ENGINES
from kestrl._app.engines.store import engines_folder, fitting
from kestrl._app.error_text import VARIABLE as ERRORS
from kestrl._shared.credentials import CALLS

COMMIT = "TEST_SHARE"
"""Environment variable with a commit that chooses one of the shares of the tests marked `share`; without it all run."""

MOST_OPEN_FILES = 400
"""Largest number of descriptors of a process that has run tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = os.environ.get(COMMIT, "")
    if not commit:
        return
    left_out = [item for item in items if not _chosen(item, int(commit, 16))]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _chosen(item: pytest.Item, commit: int) -> bool:
    """Whether a commit's share has a test: `share(n)` is in one of n, `share` in one of two."""
    marker = item.get_closest_marker("share")
    if marker is None:
        return True
    shares = marker.args[0] if marker.args else 2
    return zlib.crc32(item.nodeid.encode()) % shares == commit % shares


@pytest.fixture(scope="session", autouse=True)
def open_files() -> Iterator[None]:
    """What tests leave open is bounded: a process of CI once had more descriptors than select() takes."""
    yield
    names: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            names.append(link.readlink().name)
    assert len(names) <= MOST_OPEN_FILES, Counter(name.split(":")[0] for name in names).most_common(9)


@pytest.fixture(scope="session", autouse=True)
def credentials() -> Iterator[None]:
    """Every credential of calls, so that the servers of tests check their callers as those of a run do."""
    with pytest.MonkeyPatch.context() as patch:
        for secret in CALLS:
            patch.setenv(secret.value, f"of a test: {secret.value}")
        yield


@pytest.fixture(scope="session", autouse=True)
def installed_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs of tests run on the engine that `make setup` installs, whichever others a developer has installed."""
    folder = tmp_path_factory.mktemp("engines")
    engine = fitting(engines_folder(), "vllm", DEFAULTS["vllm", "cpu"], "cpu")
    if engine is not None:
        (folder / engine.path.name).symlink_to(engine.path.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINES, str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def texts_of_errors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The whole texts of errors are kept in a folder of the tests, not in a developer's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ERRORS, str(tmp_path_factory.mktemp("errors")))
        yield
