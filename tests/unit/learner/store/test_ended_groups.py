"""Groups that wait for the next step's file: a bounded number, and the log says what is left out."""

from __future__ import annotations

import pytest

from kestrl.episode import Group, Scenario
from kestrl.storage.episodes import GroupOutcome, StoredGroup
from kestrl_learner.store.ended_groups import EndedGroups


def ended(number: int) -> StoredGroup:
    scenario = Scenario(id=str(number), ordinal=number, messages=[])
    return StoredGroup(group=Group(id=str(number), scenario=scenario, episodes=[]), outcome=GroupOutcome.DROPPED)


def test_the_newest_groups_are_kept_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    waiting = EndedGroups(at_most=3)
    for number in range(5):
        waiting.add(ended(number))
    assert [each.group.id for each in waiting.take()] == ["2", "3", "4"]
    assert "2 of the groups that ended since the last step are not stored: more than 3 did" in caplog.text
    caplog.clear()
    waiting.add(ended(5))
    assert [each.group.id for each in waiting.take()] == ["5"]
    assert (waiting.take(), caplog.text) == ([], "")
