"""The environment of a job: `provider` is its entry in the tool service; the others are adapters, which run in its
interpreter: `reasoning_gym` and `openenv`; `verifiers_tasks` lists there what the worker's host plays.
"""
