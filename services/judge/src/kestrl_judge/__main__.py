"""`python -m kestrl_judge --settings FILE`."""

from __future__ import annotations

import sys

from kestrl.plan.settings import JudgeSettings
from kestrl.service import run_service
from kestrl_judge.service import run_judge

if __name__ == "__main__":
    sys.exit(run_service(JudgeSettings, run_judge))
