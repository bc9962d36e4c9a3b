"""Fakes and conformance suites, for KestRL's own tests and for users' tools, rewards, agents and engines."""
