"""The local runner: the plan's components as processes on loopback, with a live view. It knows nothing an operator does not."""
