"""What can be known before something starts: manifests of every kind, and this machine."""
