"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kestrl._shared.credentials import CALLS


@pytest.fixture(scope="session", autouse=True)
def credentials() -> Iterator[None]:
    """Every credential of calls, so that the servers of tests check their callers as those of a run do."""
    with pytest.MonkeyPatch.context() as patch:
        for secret in CALLS:
            patch.setenv(secret.value, f"of a test: {secret.value}")
        yield
