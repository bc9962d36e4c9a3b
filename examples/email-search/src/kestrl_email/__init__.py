"""Multi-turn e-mail search."""
