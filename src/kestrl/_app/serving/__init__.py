"""A trained policy behind an OpenAI-compatible endpoint, with the engine and its options of the run's job."""
