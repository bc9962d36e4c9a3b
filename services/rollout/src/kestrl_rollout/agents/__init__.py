"""The built-in agent loops, and loading of a user's."""
