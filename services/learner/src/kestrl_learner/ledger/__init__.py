"""The ledger: the state of every scenario of every epoch. The only package that uses SQL."""

from kestrl_learner.ledger.ledger import Lease, Ledger, LedgerError, Superseded

__all__ = ["Lease", "Ledger", "LedgerError", "Superseded"]
