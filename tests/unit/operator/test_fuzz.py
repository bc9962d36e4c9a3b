"""Random jobs: none costs the operator more memory than it has, and each is accepted or gets a condition that reports
the error."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from tests.unit.operator.fuzz import job_of, mutated, valid

PROGRAM = Path(__file__).with_name("fuzzed.py")
JOBS = 500
LARGEST_MIB = 200
"""The chart gives the operator 512 MiB."""


@pytest.mark.share(3)
@pytest.mark.timeout(240)
async def test_a_thousand_random_jobs_keep_the_operator_below_200_mib() -> None:
    seed = random.randrange(2**32)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(JOBS), str(JOBS), str(seed), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"seed {seed}"
    found = json.loads(output)
    assert found["mib"] < LARGEST_MIB, f"seed {seed}: {found}"
    # A quarter of the valid ones names what a cluster does not have, such as a local path.
    assert found["seen"]["True/Valid"] > JOBS * 0.6, f"seed {seed}: {found}"
    assert found["seen"]["False/Invalid"] > JOBS * 0.8, f"seed {seed}: {found}"


def test_random_jobs_are_valid_or_mutated_as_named() -> None:
    base = {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "a.jsonl"}},
        "rewards": [{"rule": "exact_answer"}],
    }
    made = [json.dumps(valid(random.Random(seed), base), sort_keys=True) for seed in range(20)]
    assert len(set(made)) > 15
    assert made[0] == json.dumps(valid(random.Random(0), base), sort_keys=True), "a seed is a case"
    assert all(mutated(random.Random(seed), base) != base for seed in range(20))
    assert job_of(base)["metadata"]["uid"] == job_of(base)["metadata"]["uid"]
