"""What a run is and did: its phases, how it samples, and what its files say."""
