"""KestRL's tool service: a session of tools for every episode."""
