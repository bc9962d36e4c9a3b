"""Plays of a job without a model: `playing` has them played and scored, `verdict` decides what they say."""
