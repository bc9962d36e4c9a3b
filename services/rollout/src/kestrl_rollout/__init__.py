"""KestRL's rollout worker: runs groups of episodes, token in, token out."""
