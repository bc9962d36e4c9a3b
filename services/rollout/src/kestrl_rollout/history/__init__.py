"""Histories that clients bring: read as messages, compared, and found again among the turns of an episode."""
