"""Environments of Python that uv makes: where they are, how they are made and locked, and those of requirements."""
