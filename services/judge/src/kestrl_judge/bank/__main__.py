"""`python -m kestrl_judge.bank`: asks a judge the whole bank; run by `kestrl judge check`."""

from __future__ import annotations

import asyncio
from typing import Any

from kestrl.checking import JudgeCheck, run_check
from kestrl_judge.bank.running import run_bank


def check(settings: JudgeCheck) -> dict[str, Any]:
    """The report of the bank."""
    return asyncio.run(run_bank(settings.ruler))


if __name__ == "__main__":
    run_check(JudgeCheck, check)
