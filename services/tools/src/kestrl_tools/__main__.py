"""`python -m kestrl_tools --settings FILE`."""

from __future__ import annotations

import sys

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.service import run_service
from kestrl_tools.service import run_tools

if __name__ == "__main__":
    sys.exit(run_service(ToolsSettings, run_tools))
