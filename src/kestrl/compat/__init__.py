"""Runs code that was written for other frameworks, unmodified."""
