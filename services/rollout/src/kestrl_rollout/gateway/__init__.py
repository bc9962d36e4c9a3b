"""An episode by URL: programs of others sample through it, and the worker records the tokens."""
