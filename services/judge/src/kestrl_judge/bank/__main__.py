"""`python -m kestrl_judge.bank`: asks a judge the whole bank; run by `kestrl judge check`."""

from __future__ import annotations

import asyncio
from typing import Any

from kestrl._shared.checking import JudgeCheck, run_check
from kestrl_judge.bank.running import run_bank, run_claims


def check(settings: JudgeCheck) -> dict[str, Any]:
    """The report of each judge, by its kind."""
    return asyncio.run(_check(settings))


async def _check(settings: JudgeCheck) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    if settings.ruler is not None:
        reports["ruler"] = await run_bank(settings.ruler)
    if settings.correctness is not None:
        reports["correctness"] = await run_claims(settings.correctness)
    return reports


if __name__ == "__main__":
    run_check(JudgeCheck, check)
