"""What a run keeps: checkpoints, records, metrics, and where it resumes."""
