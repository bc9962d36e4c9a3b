"""Code that was written for other frameworks, run as it is."""
