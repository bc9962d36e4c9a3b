"""What KestRL's processes share: the manifest, the plan, calls between processes and telemetry. Private."""
