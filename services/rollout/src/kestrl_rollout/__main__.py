"""`python -m kestrl_rollout --settings FILE`."""

from __future__ import annotations

import sys

import kestrl._shared.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.service import run_service
from kestrl_rollout.service import run_rollout

if __name__ == "__main__":
    sys.exit(run_service(RolloutSettings, run_rollout))
