"""`python -m kestrl_rollout --settings FILE`."""

from __future__ import annotations

import sys

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.service import run_service
from kestrl_rollout.service import run_rollout

if __name__ == "__main__":
    sys.exit(run_service(RolloutSettings, run_rollout))
