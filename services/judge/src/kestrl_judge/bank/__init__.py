"""The test bank of judges: does a judge model find what is right, whatever the order, the length, and the attack?

`cases` has the groups for a ruler and what must hold of their scores, `claims` the answers for a judge of correctness;
`running` asks a judge and makes the report. Run by `kestrl judge check`; a strong judge passes every check.
"""
