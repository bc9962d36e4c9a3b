"""From a job to its components, purely: which processes, with which settings, ports, environment and resources."""
