"""KestRL's code sandbox.

`contract` has the contract; `backends` chooses a back-end of this node, `zygote`, `bwrap` or `runsc` (the last two by
`slot_programs`); `pool` keeps places, a queue and warm `slots` for it; `results`, `cgroups`, `breaker` and `config`
are their parts. `claims` is the back-end of pods claimed from a warm pool of agent-sandbox, with `claim_objects` and
`cluster_api`; `remote_slot` and `wire` are the connection to a server in such a pod. `inside` is what runs in the
sandbox's own processes. `tool` is the tool `code_interpreter`, `server` the HTTP interface, `report` is for `kestrl
doctor`. `hostile` and `checks` are the programs of `kestrl sandbox check` (`commands`).
"""
