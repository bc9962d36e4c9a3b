"""Tools that run a model's code, as providers: config, the pool that they share, sessions, what the model reads."""
