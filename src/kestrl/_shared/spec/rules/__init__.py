"""Rules across fields of a manifest."""
