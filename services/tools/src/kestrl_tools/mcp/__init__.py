"""Tools of MCP servers: `provider` is the ToolProvider, `connection` keeps a connection, `stdio` runs a program,
`results` converts what a call returns. `kestrl_tools.servers` checks and pins what a server lists.

The SDK (`mcp`) takes a second to import, so that only `connection`, `stdio`, `results` and `sdk` import it, and only a
job with a server loads them.
"""
