"""The inference engines: the policy versions that each has verified, and the load that each takes."""
