"""Hostile programs, and whether a sandbox withstands them."""
