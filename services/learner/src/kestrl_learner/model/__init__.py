"""The model under training: its log-probabilities and its adapter as files."""
