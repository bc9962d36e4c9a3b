"""KestRL's judge: scores groups, and never turns its own failure into a reward."""
