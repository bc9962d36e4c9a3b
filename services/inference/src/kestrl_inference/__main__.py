"""`python -m kestrl_inference --settings FILE`."""

from __future__ import annotations

import sys

import kestrl.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl.plan.settings import AgentSettings
from kestrl.service import run_service
from kestrl_inference.service import run_agent

if __name__ == "__main__":
    sys.exit(run_service(AgentSettings, run_agent))
