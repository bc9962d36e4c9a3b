"""Agents outside of the worker, which run an episode by its URL: programs, a process of the user's code, services."""
