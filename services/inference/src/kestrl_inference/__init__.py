"""KestRL's engine agent: the only door to an inference engine's control routes."""
