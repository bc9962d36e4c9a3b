"""Processes: SIGTERM while a program starts, and children that end with all below them."""
