"""An episode in progress: its turns, its rows of tokens and its tools."""
