"""A task set of verifiers for tests: say a word. Its harness asks in the server's own process; `trick` misbehaves."""

from word_tasks.harness import WordHarness
from word_tasks.taskset import WordTaskset

__all__ = ["WordHarness", "WordTaskset"]
