"""The local runner: the components of a plan as processes on loopback, with a live view."""
