"""The episodes of a group, from the request to their scores."""
