"""Places for runs of code: slots, their leaders, limits and queue."""
