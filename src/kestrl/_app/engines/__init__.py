"""Engines in environments of their own: which are installed, how they are made, and their interpreters."""
