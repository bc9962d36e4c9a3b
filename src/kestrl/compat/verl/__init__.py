"""Agent loops and tools that were written for verl 0.8, 0.9 and its main branch, run as they are.

`imports` stands in for the modules of verl that such files import, whether verl is installed or not; `names` is what those hold;
`loops` runs an agent loop, `tools` a tool. docs/coming-from.md says what is not supported.
"""
