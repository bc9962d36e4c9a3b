"""Processes that compute one step together."""
