"""Generated; never edited."""
