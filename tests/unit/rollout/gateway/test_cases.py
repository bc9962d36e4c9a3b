"""The worker's gateway in the public suite of cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.gateway.subject import WorkerGateway

from kestrl.testing.gateway import CASES, Subject, check_gateway

PARTS = 4
PAGE = Path(__file__).parents[4] / "docs" / "gateway.md"


@pytest.fixture
async def gateway(served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch) -> Subject:
    return WorkerGateway(served, make_stage, monkeypatch)


NUMBERS = [case.number for case in CASES.values() if case.check is not None]


@pytest.mark.parametrize("part", range(PARTS))
async def test_the_gateway_passes(gateway: Subject, part: int) -> None:
    """Cases share a stage, whose start takes longer than they do."""
    failed: list[str] = []
    for number in NUMBERS[part::PARTS]:
        try:
            await check_gateway(gateway, number)
        except AssertionError as error:
            failed.append(str(error))
    assert failed == []


async def test_a_case_names_what_does_not_hold(served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = WorkerGateway(served, make_stage, monkeypatch, key="wrong")
    with pytest.raises(AssertionError, match=r"^case 16, a prompt that is sent twice is sampled twice: "):
        await check_gateway(broken, 16)
    with pytest.raises(ValueError, match=r"case 35, .*benchmarks"):
        await check_gateway(broken, 35)


def test_there_are_57_cases_and_one_without_a_program_says_why() -> None:
    assert list(CASES) == list(range(1, 58))
    assert all(bool(case.check) != bool(case.elsewhere) for case in CASES.values())


def test_the_page_lists_the_cases() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for case in CASES.values():
        rest = " |" if case.check else f": not in the suite; {case.elsewhere} |"
        assert f"| {case.number} | {case.title}{rest}" in lines
