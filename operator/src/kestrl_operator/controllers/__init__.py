"""One pass over one object: observe, decide, render, apply, write the status."""
