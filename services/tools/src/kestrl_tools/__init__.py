"""KestRL's tool service: one session of tools per episode.

`catalogue` loads the job's tools, `sessions` keeps one instance per episode, `instances` and `tool_threads` run tools,
`execution` classifies results and errors, `lifecycle` starts and stops what tools share, `servicer` has the gRPC
service. `calculator` is a built-in tool.
"""
