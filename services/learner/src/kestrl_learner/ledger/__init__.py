"""The ledger: what became of every scenario of every epoch. The only place that speaks SQL."""

from kestrl_learner.ledger.ledger import Lease, Ledger, LedgerError, Superseded

__all__ = ["Lease", "Ledger", "LedgerError", "Superseded"]
