"""Runs agent loops and tools that were written for verl 0.8, 0.9 and its main branch, unmodified.

`imports` replaces the modules of verl that such files import, whether verl is installed or not; `names` has their
contents; `loops` runs an agent loop, `tools` a tool. docs/coming-from.md says what is not supported.
"""
