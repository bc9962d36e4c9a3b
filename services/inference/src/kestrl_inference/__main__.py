"""`python -m kestrl_inference --settings FILE`."""

from __future__ import annotations

import sys

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.service import run_service
from kestrl_inference.service import run_agent

if __name__ == "__main__":
    sys.exit(run_service(AgentSettings, run_agent))
