"""`python -m kestrl_rollout --settings FILE`."""

from __future__ import annotations

import sys

import kestrl.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl.plan.settings import RolloutSettings
from kestrl.service import run_service
from kestrl_rollout.service import run_rollout

if __name__ == "__main__":
    sys.exit(run_service(RolloutSettings, run_rollout))
