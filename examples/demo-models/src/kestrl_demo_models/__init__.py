"""Models to begin with: `demo://tiny`, warmed up on e-mail search, and `demo://smollm2`."""
