"""KestRL's code sandbox.

`contract` has the contract and `config` its settings. `backends` chooses a back-end of this node: `zygote`, `bwrap` or
`runsc`. `pool` keeps places, a queue and warm slots for it. `remote` is the back-end of pods claimed from a warm pool
of agent-sandbox, and the HTTP server in such a pod (`python -m kestrl_sandbox`). `inside` is what runs in the sandbox's
own processes. `tool` declares the tool `code_interpreter` and `interpreter` is its provider, `report` is for `kestrl
doctor`, and `checks` are the programs of `kestrl sandbox check` (`commands`).
"""
