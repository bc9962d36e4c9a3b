"""What runs in an engine's own interpreter: launcher, guard, record of failed starts, adapters on a CPU.

Uses the standard library and what the engine itself has; nothing else of KestRL is there.
"""
