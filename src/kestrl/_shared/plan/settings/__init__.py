"""Settings of each service: one model per service, written by `plan` and read by the service's `main`.

The local runner writes them to a file, the operator to a ConfigMap; both pass `--settings PATH`. They never contain
secrets, which are passed as environment variables (`kestrl._shared.credentials`).
"""
