"""Exit codes and variables of all programs."""

EXIT_INPUT = 2
"""Exit code for invalid input."""
EXIT_FAILED = 1
"""Exit code for any other failure."""
LEVEL_VARIABLE = "KESTRL_LOG_LEVEL"
"""Environment variable with the level of a service's log, such as DEBUG."""
FORMAT_VARIABLE = "KESTRL_LOG_FORMAT"
"""Environment variable with the form of log lines, `text` or `json`."""
