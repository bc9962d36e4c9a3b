"""What is known: objects as the watch streams delivered them, the typed snapshot of a job, nodes, and the
administrator's settings.
"""
