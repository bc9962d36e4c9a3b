"""KestRL's tool service: a session of tools for every episode.

`catalogue` loads the job's tools, `sessions` keeps one instance per episode, `instances` and `lanes` say where a tool runs,
`execution` sorts what came of a call, `servicer` is the wire. `calculator` is a tool that comes with it.
"""
