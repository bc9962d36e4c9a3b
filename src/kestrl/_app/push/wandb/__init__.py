"""The target Weights & Biases, by its own package in an environment of its own."""
