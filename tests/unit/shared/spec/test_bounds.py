"""Values at a bound: what is still accepted, and what is the first that is not."""

from __future__ import annotations

import pytest
from tests.unit.shared.spec.test_job import MANIFEST, refused

from kestrl._shared.spec import parse_job, with_overrides
from kestrl._shared.spec.scalars import LONGEST_SECONDS, parse_duration


@pytest.mark.parametrize(
    ("accepted", "beyond", "field"),
    [
        ("algorithm.correction={rejectBelow: 0.5, rejectAbove: 0.5}", "{rejectBelow: 0.6, rejectAbove: 0.5}", "reject"),
        ("algorithm.correction={low: 0.5, high: 0.5}", "{low: 0.6, high: 0.5}", "low"),
        ("algorithm.miniBatches=8", "9", "miniBatches"),
        ("inference={contextLength: 1024, adapterSlots: 2}", "{contextLength: 64, adapterSlots: 2}", "maxTokens"),
        ("agent.maxTokens=1023", "1024", "maxTokens"),
        ("agent={maxTokens: 64, maxTokensPerTurn: 64}", "{maxTokens: 64, maxTokensPerTurn: 65}", "maxTokensPerTurn"),
        ("agent={run: 'mine:agent', config: {a: 1}}", "{maxTokens: 9, config: {a: 1}}", "config"),
        ("agent={command: [a], image: i, replicas: 2}", "{command: [a], replicas: 2}", "replicas"),
        ("data.files=[{uri: a.db, size: 1Mi}]", "[{uri: 'ftp://h/a.db', size: 1Mi}]", "uri"),
        (
            "data.files=[{uri: a.db, size: 1Mi}, {uri: b.db, size: 1Mi}]",
            "[{uri: a.db, size: 1Mi}, {uri: a.db, size: 1Mi}]",
            "uri",
        ),
    ],
)
def test_a_value_at_its_bound_is_accepted_and_the_next_one_is_not(accepted: str, beyond: str, field: str) -> None:
    path = accepted.partition("=")[0]
    limits = ["inference.contextLength=1024", "agent.maxTokens=64", "algorithm.groupsPerStep=8"]
    limits += ["tools=[]"] if "run:" in accepted else []
    parse_job(with_overrides(MANIFEST, [*limits, accepted]))
    (problem,) = refused(*limits, f"{path}={beyond}")
    assert field in problem.partition(":")[0]


def test_ten_years_is_the_longest_duration() -> None:
    assert parse_duration(f"{LONGEST_SECONDS:.0f}s") == LONGEST_SECONDS
    with pytest.raises(ValueError, match="longer than ten years"):
        parse_duration(f"{LONGEST_SECONDS + 1:.0f}s")
