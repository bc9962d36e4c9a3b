"""The peak memory of a step, estimated before anything is loaded."""
