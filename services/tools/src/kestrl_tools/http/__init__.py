"""Tools of HTTP servers: `provider` is the ToolProvider.

`document` reads an OpenAPI document, `schemas` resolves and converts its JSON Schemas, and `operations` makes tools of
its operations and of endpoints that the manifest declares. `requests` turns arguments into a request, `egress` decides
which hosts and addresses may be called, `client` sends and retries, and `results` converts responses.
"""
