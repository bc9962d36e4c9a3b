"""Multi-turn e-mail search, KestRL's demo application."""
