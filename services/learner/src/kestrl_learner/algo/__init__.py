"""Algorithms as small pure functions, a registry entry each. The trainer sees only per-token streams."""
