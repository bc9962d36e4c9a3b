"""From a job to its components, purely: which processes, with which settings, ports, environment and resources.

`kestrl.plan.planning` plans, `kestrl.plan.components` says what a component is. Nothing is imported here, so that a service
which only reads its settings does not load the models of the manifest.
"""
