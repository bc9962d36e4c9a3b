"""KestRL's tool service: one session of tools per episode.

`catalogue` lists the tools of every provider: `python_provider` for functions and classes of the user (run by
`instances` and `tool_threads`, or by `process` outside the service), `mcp` and `http` for servers, whose lists
`servers` checks. `sessions` keeps one provider session per episode, `execution` classifies results and errors,
`lifecycle` starts and stops providers, `servicer` has the gRPC service. `calculator` is a built-in tool.
"""
