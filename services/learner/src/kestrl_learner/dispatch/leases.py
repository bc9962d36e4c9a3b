"""Leases of scenarios, as the ledger hands them out to a source of groups."""

from __future__ import annotations

from kestrl_learner.ledger import Lease, Ledger


class ScenarioLeases:
    """Leases of one run, and whether the ledger had none left when it was asked last.

    Args:
        ledger: The run's ledger, which records every transition.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.exhausted = False
        """Whether no scenario can be leased until one is released."""

    def next(self, policy_step: int) -> Lease | None:
        """The next scenario, for a version of the policy; None if none is left."""
        lease = self._ledger.lease(policy_step)
        self.exhausted = lease is None
        return lease

    def finish(self, lease: Lease) -> None:
        """Records that the group is complete and waits for its step."""
        self._ledger.finish(lease)

    def drop(self, lease: Lease, reason: str) -> None:
        """Drops the scenario of a group that has not finished."""
        self._ledger.drop(lease, reason)

    def release(self, lease: Lease, reason: str, *, failed: bool = False) -> None:
        """Makes the scenario of a group that has not finished pending again; with `failed`, the attempt counts."""
        self._ledger.release(lease, reason, failed=failed)
        self.exhausted = False

    def release_finished(self, lease: Lease, reason: str) -> None:
        """Makes the scenario of a finished group that no step took pending again."""
        self._ledger.release(lease, reason, leaves="finished")
        self.exhausted = False
