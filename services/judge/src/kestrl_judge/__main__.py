"""`python -m kestrl_judge --settings FILE`."""

from __future__ import annotations

import sys

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.service import run_service
from kestrl_judge.service import run_judge

if __name__ == "__main__":
    sys.exit(run_service(JudgeSettings, run_judge))
