"""KestRL."""
