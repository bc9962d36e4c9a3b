"""What all tests share."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from kestrl._shared.credentials import CALLS

SHARES = 2
COMMIT = "TEST_SHARE"
"""Environment variable with a commit that chooses one of the shares of the tests marked `share`; without it all run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = os.environ.get(COMMIT, "")
    if not commit:
        return
    chosen = int(commit, 16) % SHARES
    left_out = [
        item
        for item in items
        if item.get_closest_marker("share") and zlib.crc32(item.nodeid.encode()) % SHARES != chosen
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def credentials() -> Iterator[None]:
    """Every credential of calls, so that the servers of tests check their callers as those of a run do."""
    with pytest.MonkeyPatch.context() as patch:
        for secret in CALLS:
            patch.setenv(secret.value, f"of a test: {secret.value}")
        yield
