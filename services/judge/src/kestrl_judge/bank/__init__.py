"""The test bank of judges: does a judge model rank what is right, whatever the order, the length, and the attack?

`cases` has the groups and what must hold of their scores, `running` asks a judge and makes the report. Run by `kestrl
judge check`; a strong judge passes every check.
"""
