"""What the cluster reports: watch streams, their audit, and changes by others."""
