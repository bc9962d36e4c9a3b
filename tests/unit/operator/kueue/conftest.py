"""The `stage` and Kueue in its cluster."""

from __future__ import annotations

import pytest
from tests.unit.operator.live.conftest import stage
from tests.unit.operator.live.stage import Stage

from .fake_kueue import FakeKueue

__all__ = ["stage"]


@pytest.fixture
def kueue(stage: Stage) -> FakeKueue:
    """Kueue's kinds, with a flavor for everything."""
    kueue = FakeKueue(stage.cluster)
    kueue.add("resourceflavors", "ResourceFlavor", "default", spec={})
    return kueue
