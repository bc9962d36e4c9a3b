"""Groups on their way to rollout workers and back: leased, sent, accepted, retried or dropped."""
