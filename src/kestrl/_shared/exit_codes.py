"""Exit codes of all programs."""

EXIT_INPUT = 2
"""Exit code for invalid input."""
EXIT_FAILED = 1
"""Exit code for any other failure."""
