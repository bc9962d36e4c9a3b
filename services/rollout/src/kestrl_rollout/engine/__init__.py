"""Requests to inference engines, and the placement of episodes on them."""
