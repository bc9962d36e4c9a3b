"""Sandboxes of other processes: the HTTP server, and slots over a WebSocket."""
