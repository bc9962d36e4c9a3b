"""Pure planning from a job to its components: processes, settings, ports, environment and resources.

`planning` plans, `components` defines components. Nothing is imported here, so that a service that only reads its
settings does not load the models of the manifest.
"""
