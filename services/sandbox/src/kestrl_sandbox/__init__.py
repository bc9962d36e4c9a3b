"""KestRL's code sandbox.

`contract` has the contract, `pool` keeps it with a back-end such as `zygote`; `slots`, `results`, `cgroups` and `breaker`
are their parts. `inside` is what
runs in the sandbox's own processes.
"""
