"""`python -m kestrl_tools --settings FILE`."""

from __future__ import annotations

import sys

import kestrl.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl.plan.settings import ToolsSettings
from kestrl.service import run_service
from kestrl_tools.service import run_tools

if __name__ == "__main__":
    sys.exit(run_service(ToolsSettings, run_tools))
