"""KestRL's engine agent: the only client of an inference engine's control routes."""
