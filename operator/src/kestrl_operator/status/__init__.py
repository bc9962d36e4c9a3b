"""From the snapshot of a job to the decision about it and the status that is written. Pure."""
