"""RULER: a language model scores the episodes of a group relative to each other, in one request.

Pure parts: `trajectories` (what a judge sees of an episode), `escaping`, `shortening` (a token budget), `prompt` (ids,
order, messages) and `reply` (the schema and its check). `pacing`, `client`, `budget` and `journal` bound and record the
requests; `asking` asks the judges of one prompt, and `scorer` scores groups.
"""
