"""Stored evaluations of two policies, compared question by question."""
