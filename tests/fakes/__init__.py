"""Fakes of the servers that KestRL calls, and servers for tests: an engine, Kubernetes, S3, PostgreSQL, OTLP."""
