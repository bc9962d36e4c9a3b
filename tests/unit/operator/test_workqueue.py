"""The work queue on its own: pauses of a key that keeps failing."""

from __future__ import annotations

from kestrl_operator.work.workqueue import BACKOFF, Queue


async def test_a_key_that_has_failed_for_days_waits_for_the_longest_pause() -> None:
    queue: Queue[str] = Queue()
    pauses = [queue.failed("team-a/job") for _ in range(2000)]
    assert pauses[:4] == [0.5, 1, 2, 4]
    assert set(pauses[8:]) == {BACKOFF.limit}
    assert queue.failures("team-a/job") == 2000
