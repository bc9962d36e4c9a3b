"""Conformance suites for users' own parts, and helpers for testing tools, rewards and agents."""
