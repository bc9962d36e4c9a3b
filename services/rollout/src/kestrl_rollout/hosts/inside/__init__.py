"""What runs in the interpreter of an agent, with the standard library alone."""
